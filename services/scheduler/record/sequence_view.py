"""History of a sequence: admissions, tokens, pages, preemptions and end."""

from dataclasses import dataclass, field

from rich.console import RenderableType

from services.scheduler.record.occupants import SequenceName, admitted
from services.scheduler.record.reader import RecordedStep
from services.scheduler.record.view import View, listed, table
from services.scheduler.record.worker_state import WorkerState
from tokasaurus.worker.v1 import plan_pb2


@dataclass
class _Event:
    first: int  # step
    last: int
    kind: str
    detail: str = ""
    tokens: list[int] = field(default_factory=list)

    @property
    def steps(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class SequenceView(View):
    """View of a sample, or of all samples of a request. Memory grows only with their tokens."""

    def __init__(self, wanted: str) -> None:
        """Create the view of ``wanted``, which is ``REQUEST_ID`` or ``REQUEST_ID:SAMPLE``."""
        self._wanted = wanted
        self._events: dict[SequenceName, list[_Event]] = {}
        self._running: dict[int, SequenceName] = {}  # shown sequences by slot

    def before(self, step: RecordedStep, state: WorkerState) -> None:
        """Record the events of the step. The plan has them all, so a plan that violates the contract is shown too."""
        plan, number = step.plan.plan, step.plan.plan.step
        for slot in plan.release_slots:
            name = self._running.pop(slot, None)
            if name is not None:
                self._add(name, number, "released", f"slot {slot}")
        for admitted_name, admission in admitted(step.plan):
            if self._wanted in (admitted_name.request_id, str(admitted_name)):
                self._running[admission.slot] = admitted_name
                self._admitted(admitted_name, number, admission)
        for slot, page in zip(plan.append_slots, plan.append_pages, strict=False):
            if slot in self._running:
                self._add(self._running[slot], number, "page", f"{page} appended")
        if step.result is not None and self._running:
            self._answered(step.result.result)

    def shown(self) -> list[RenderableType]:
        tables = []
        running = {name: slot for slot, name in self._running.items()}
        for name in sorted(self._events):
            rows = [(event.steps, event.kind, _detail(event)) for event in self._events[name]]
            if name in running:
                rows.append(("", "not released", f"in slot {running[name]} where the recording ends"))
            tables.append(table(f"sequence {name}", ("step", "what", ""), rows))
        return tables

    def _admitted(self, name: SequenceName, step: int, admission: plan_pb2.Admission) -> None:
        earlier = [event for event in self._events.get(name, ()) if event.kind == "released"]
        again = ""
        if earlier:
            earlier[-1].kind = "preempted"
            again = " again"
        detail = (
            f"slot {admission.slot}, {len(admission.token_ids)} tokens, {admission.cached_tokens} cached, pages"
            f" {listed(admission.pages)}"
        )
        self._add(name, step, f"admitted{again}", detail)

    def _answered(self, result: plan_pb2.StepResult) -> None:
        for slot, token in zip(result.slots, result.token_ids, strict=False):
            if slot in self._running:
                events = self._events[self._running[slot]]
                if events[-1].kind != "tokens":
                    events.append(_Event(result.step, result.step, "tokens"))
                events[-1].last = result.step
                events[-1].tokens.append(token)
        for failure in result.failures:
            if failure.slot in self._running:
                self._add(self._running[failure.slot], result.step, "failed", failure.message)

    def _add(self, name: SequenceName, step: int, kind: str, detail: str) -> None:
        self._events.setdefault(name, []).append(_Event(step, step, kind, detail))


def _detail(event: _Event) -> str:
    return f"{len(event.tokens)}: {listed(event.tokens)}" if event.kind == "tokens" else event.detail
