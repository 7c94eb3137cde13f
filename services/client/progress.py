"""The progress bar of ``generate``, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.client.outputs import RequestOutput
from services.common.errors import InvalidRequest


@contextmanager
def progress_bar(prompts: int) -> Iterator[Callable[[RequestOutput], None]]:
    """Show the numbers of prompts, tokens and failures. Yields the function that counts an output.

    Raises ``InvalidRequest`` if rich is not installed.
    """
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
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=prompts, tokens=0, failed=0)
        tokens = failed = 0

        def count(output: RequestOutput) -> None:
            nonlocal tokens, failed
            tokens += output.usage.completion_tokens
            failed += output.error is not None
            bar.update(task, advance=1, tokens=tokens, failed=failed)

        yield count
