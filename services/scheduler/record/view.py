"""Interface of the views of a recording, and functions that they share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.scheduler.record.reader import RecordedStep, Recording, RecordingError
from services.scheduler.record.violation import Violation
from services.scheduler.record.worker_state import WorkerState


class View(ABC):
    """Collects facts from the steps of a recording. A view is used for one recording."""

    done = False  # the rest of the recording is not needed

    @abstractmethod
    def before(self, step: RecordedStep, state: WorkerState) -> None:
        """Collect facts of ``step`` before ``state`` changes by it."""

    def after(self, step: RecordedStep, state: WorkerState) -> None:  # noqa: B027  # optional
        """Collect facts of ``step`` after ``state`` changed by it."""

    @abstractmethod
    def shown(self) -> list[RenderableType]:
        """Return the parts to print. Empty if nothing was found."""


def walk(recording: Recording, view: View) -> str:
    """Show the steps of ``recording`` to ``view``. Return the violation or damage that ended it early, or ''."""
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
    """Return a table with all cells as text, long cells folded. The title is outside because a table would wrap it."""
    drawn = Table(header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(str(cell) for cell in row))
    return Group(Text(title, style="bold"), drawn)


def listed(numbers: Iterable[int]) -> str:
    """Return the numbers with spaces in between, or a dash if there are none."""
    return " ".join(str(number) for number in numbers) or "-"
