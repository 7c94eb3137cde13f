"""Shows a load on the terminal: a progress bar on stderr, and then its figures."""

import statistics
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.cli.bench.exchange import Reply
from services.cli.bench.figures import Figures, Spread, histogram, output_rate
from services.cli.bench.load import LoadOutcome
from services.cli.bench.sending import ClientReport
from services.cli.sparkline import sparkline

_BINS = 40
_TIMES = (
    ("first token", "first_token_ms"),
    ("inter-token", "inter_token_ms"),
    ("per output token", "per_token_ms"),
    ("end to end", "end_to_end_ms"),
)
_BUSY = 0.8  # share of a core. A client process that takes more may limit the load
_SHOWN = 300  # characters of an error that are shown


class Live:
    """The progress bar of the loads, one after the other. Used by the thread that waits for them."""

    def __init__(self, console: Console) -> None:
        columns: tuple[ProgressColumn, ...] = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tokens = self._arrivals = self._failed = self._done = 0
        self._firsts: list[float] = []

    def __enter__(self) -> "Live":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, title: str, total: int | None) -> None:
        """Show the next load, of ``total`` requests. None: the number is not known."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._tokens = self._arrivals = self._failed = self._done = 0
        self._firsts = []
        self._task = self._progress.add_task(title, total=total, status="")

    def update(self, reports: list[ClientReport], outcome: LoadOutcome) -> None:
        """Show the progress after new ``reports``."""
        if not reports:
            return
        for report in reports:
            self._arrivals += report.arrivals
            for _, reply in report.replies:
                self._done += 1
                self._failed += bool(reply.error)
                self._tokens += reply.completion_tokens
                if not reply.error:
                    self._firsts.append(reply.first_at - reply.sent_at)
        elapsed = self._progress.tasks[0].elapsed or 0.0
        status = f"{outcome.running} running"
        if self._failed:
            status += f", [red]{self._failed} failed[/]"
        if elapsed > 0 and (self._tokens or self._arrivals):
            # Running streams have no usage yet. Each arrival of text is at least one token.
            status += f", {max(self._tokens, self._arrivals) / elapsed:,.0f} tok/s"
        if self._arrivals and self._firsts:
            status += f", first token {1000 * statistics.median(self._firsts[-1000:]):,.0f} ms"
        self._progress.update(self._task, completed=self._done, status=status)


def show(console: Console, title: str, figures: Figures, replies: Sequence[Reply]) -> None:
    """Print the table of a load, its throughput over time, and the distribution of its times."""
    console.print(f"[bold]{escape(title)}[/]", highlight=False)
    rates = Table(show_header=False)
    rates.add_column()
    rates.add_column(justify="right")
    rates.add_row("requests", f"{figures.succeeded:,} in {figures.seconds:,.2f} s")
    rates.add_row("requests/s", f"{figures.rate(figures.succeeded):,.2f}")
    rates.add_row("input tokens/s", f"{figures.rate(figures.input_tokens):,.1f}")
    rates.add_row("output tokens/s", f"{figures.rate(figures.output_tokens):,.1f}")
    rates.add_row("tokens in, out", f"{figures.input_tokens:,}, {figures.output_tokens:,}")
    if figures.failed:
        rates.add_row("[red]failed[/]", f"[red]{figures.failed:,}[/]")
    if figures.unfinished:
        rates.add_row("unfinished", f"{figures.unfinished:,}")
    console.print(rates)

    spreads = [(name, getattr(figures, field)) for name, field in _TIMES if getattr(figures, field) is not None]
    if spreads:
        console.print(_times(spreads))
    _charts(console, replies, streamed=figures.first_token_ms is not None)
    show_errors(console, figures)


def show_errors(console: Console, figures: Figures) -> None:
    """Print the number of errors of each kind, and an example."""
    for kind, errors in figures.errors.items():
        console.print(f"[red]{errors.count} x {escape(kind)}[/], the first: {escape(errors.example[:_SHOWN])}")


def warn_if_busy(console: Console, busy: float) -> None:
    """Print a warning if a client process used ``busy`` of a core, so that it may have limited the load."""
    if busy > _BUSY:
        console.print(
            f"[yellow]A client process used {busy:.0%} of a core, so it may limit the load. Increase --clients.[/]"
        )


def _times(spreads: list[tuple[str, Spread]]) -> Table:
    table = Table()
    table.add_column("milliseconds")
    for heading in ("mean", "p50", "p90", "p99", "most"):
        table.add_column(heading, justify="right")
    for name, spread in spreads:
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
        table.add_row(name, *(f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in values))
    return table


def _charts(console: Console, replies: Sequence[Reply], *, streamed: bool) -> None:
    good = [reply for reply in replies if not reply.error]
    if not good:
        return
    _, rates = output_rate(replies, _BINS, streamed=streamed)
    console.print(f"tokens/s over time   {sparkline(rates)}  up to {max(rates):,.0f}", highlight=False)
    kinds = [("end to end", [1000 * (reply.ended_at - reply.sent_at) for reply in good])]
    if streamed:
        kinds.insert(0, ("first token", [1000 * (reply.first_at - reply.sent_at) for reply in good]))
    for name, values in kinds:
        edges, counts = histogram(values, _BINS)
        bars = sparkline(counts)
        console.print(f"{name:20} {bars}  {edges[0]:,.3g} to {edges[-1]:,.3g} ms, log scale", highlight=False)
