"""What every view of a recording does: look at each step before and after it changes the worker's state."""

from collections.abc import Iterable
from typing import Protocol

from rich.console import RenderableType
from rich.table import Table

from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.occupants import Occupants
from services.scheduler.record.reader import RecordedStep, Recording
from services.scheduler.record.violation import Violation


class WorkerState:
    """What the worker holds after the plans so far."""

    def __init__(self, recording: Recording) -> None:
        self.checker = PlanChecker(recording.info)
        self.occupants = Occupants()


class View(Protocol):
    """Collects from the steps what it wants to show. One view for one recording."""

    done: bool  # the rest of the recording is of no interest

    def before(self, step: RecordedStep, state: WorkerState) -> None: ...

    def after(self, step: RecordedStep, state: WorkerState) -> None: ...

    def shown(self) -> list[RenderableType]:
        """What to print; empty = nothing was found."""
        ...


def walk(recording: Recording, view: View) -> str:
    """Lead ``view`` through ``recording``. Returns the violation that ended it early, empty = none."""
    state = WorkerState(recording)
    for step in recording.steps():
        view.before(step, state)
        state.occupants.apply(step.plan)
        try:
            state.checker.apply(step.plan.plan)
            state.checker.answered(step.result.result if step.result else None)
        except Violation as violation:
            return str(violation)
        view.after(step, state)
        if view.done:
            break
    return ""


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Everything as text, long cells folded."""
    drawn = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(str(cell) for cell in row))
    return drawn


def listed(numbers: Iterable[int]) -> str:
    """``1 2 3``; a dash for none."""
    return " ".join(str(number) for number in numbers) or "-"
