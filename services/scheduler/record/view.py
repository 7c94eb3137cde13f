"""What every view of a recording does: look at each step before and after it changes the worker's state."""

from collections.abc import Iterable
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.scheduler.record.reader import RecordedStep, Recording, RecordingError
from services.scheduler.record.violation import Violation
from services.scheduler.record.worker_state import WorkerState


class View(Protocol):
    """Collects from the steps what it wants to show. One view for one recording."""

    done: bool  # the rest of the recording is of no interest

    def before(self, step: RecordedStep, state: WorkerState) -> None: ...

    def after(self, step: RecordedStep, state: WorkerState) -> None: ...

    def shown(self) -> list[RenderableType]:
        """What to print; empty = nothing was found."""
        ...


def walk(recording: Recording, view: View) -> str:
    """Lead ``view`` through ``recording``. Returns the violation or the damage that ended it early, empty = none."""
    state = WorkerState(recording)
    try:
        for step in recording.steps():
            view.before(step, state)
            state.apply(step)
            view.after(step, state)
            if view.done:
                break
    except (Violation, RecordingError) as reason:
        return str(reason)
    return ""


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> RenderableType:
    """Everything as text, long cells folded. A title may be wider than its table, which would wrap one of its own."""
    drawn = Table(header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(str(cell) for cell in row))
    return Group(Text(title, style="bold"), drawn)


def listed(numbers: Iterable[int]) -> str:
    """``1 2 3``; a dash for none."""
    return " ".join(str(number) for number in numbers) or "-"
