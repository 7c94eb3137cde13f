"""History of a page: the sequences that held it, its copies, and its tokens."""

from dataclasses import dataclass

from rich.console import RenderableType

from services.scheduler.record.occupants import admitted
from services.scheduler.record.reader import RecordedStep
from services.scheduler.record.view import View, listed, table
from services.scheduler.record.worker_state import WorkerState


@dataclass
class _Holding:
    sequence: str
    slot: int
    index: int  # in the page table
    how: str
    first: int  # step
    last: int | None = None  # step that releases it; None = not released
    tokens: str = "-"


class PageView(View):
    """View of one page. Memory grows only with the number of its holders."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._holdings: list[_Holding] = []
        self._held: dict[int, _Holding] = {}  # by slot
        self._copies: list[tuple[int, int, int]] = []  # (step, source, target)

    def before(self, step: RecordedStep, state: WorkerState) -> None:
        """Record releases, with the tokens until then, and the admissions and copies of the plan."""
        plan, self._state = step.plan.plan, state
        for slot in plan.release_slots:
            holding = self._held.pop(slot, None)
            if holding is not None:
                holding.last, holding.tokens = plan.step, self._tokens(holding, state)
        for name, admission in admitted(step.plan):
            pages = list(admission.pages)
            if self._page in pages:
                index, size = pages.index(self._page), state.checker.limits.page_size
                cached = min(admission.cached_tokens - index * size, size)
                how = f"{cached} tokens cached" if cached > 0 else "new"
                self._hold(_Holding(str(name), admission.slot, index, how, plan.step))
        for source, target in zip(plan.copy_source_pages, plan.copy_target_pages, strict=False):
            if self._page in (source, target):
                self._copies.append((plan.step, source, target))

    def after(self, step: RecordedStep, state: WorkerState) -> None:
        plan = step.plan.plan
        for slot, page in zip(plan.append_slots, plan.append_pages, strict=True):
            if page == self._page:
                index = state.checker.slots.pages(slot).tolist().index(page)
                self._hold(_Holding(state.occupants.name(slot), slot, index, "appended", plan.step))

    def shown(self) -> list[RenderableType]:
        tables = []
        for holding in self._held.values():
            holding.tokens = self._tokens(holding, self._state)
        if self._holdings:
            rows = (
                (h.first, "-" if h.last is None else h.last, h.sequence, h.slot, h.index, h.how, h.tokens)
                for h in self._holdings
            )
            columns = ("from step", "to step", "sequence", "slot", "place", "how", "tokens in it")
            tables.append(table(f"page {self._page}", columns, rows))
        if self._copies:
            tables.append(table(f"copies from and onto page {self._page}", ("step", "from", "onto"), self._copies))
        return tables

    def _hold(self, holding: _Holding) -> None:
        self._held[holding.slot] = holding
        self._holdings.append(holding)

    def _tokens(self, holding: _Holding, state: WorkerState) -> str:
        """Return the tokens of the holder whose keys and values are in the page."""
        checker = state.checker
        size = checker.limits.page_size
        count = int(checker.slots.computed[holding.slot]) - holding.index * size
        return listed(checker.page_tokens[self._page, : max(0, min(size, count))].tolist())
