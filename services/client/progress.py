"""The progress bar of ``generate``, on stderr."""

from collections.abc import Callable
from types import TracebackType

from services.client.outputs import RequestOutput
from services.common.errors import InvalidRequest


class Progress:
    """A progress bar with the numbers of prompts, tokens and failures."""

    def __init__(self, prompts: int) -> None:
        """Create the bar. Raises ``InvalidRequest`` if rich is not installed."""
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            raise InvalidRequest("progress: the bar needs rich (pip install rich)", field="progress") from None
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[tokens]} tokens, {task.fields[failed]} failed"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        self._bar = progress.Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("", total=prompts, tokens=0, failed=0)
        self._tokens = self._failed = 0

    def __enter__(self) -> Callable[[RequestOutput], None]:
        self._bar.start()
        return self._count

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _count(self, output: RequestOutput) -> None:
        self._tokens += output.usage.completion_tokens
        self._failed += output.error is not None
        self._bar.update(self._task, advance=1, tokens=self._tokens, failed=self._failed)
