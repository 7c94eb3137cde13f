"""``toka-bench latency``: measures streams that begin together."""

from dataclasses import asdict
from typing import ClassVar

from pydantic import Field, field_validator
from rich.markup import escape
from rich.table import Column, Table

from services.cli.bench.commands.options import (
    OutputTokens,
    PromptTokens,
    RequestFlags,
    ResultFlags,
    ServerFlags,
    Timeout,
)
from services.cli.bench.display import Live, show_errors
from services.cli.bench.exchange import Reply
from services.cli.bench.figures import Figures
from services.cli.bench.load import OfferedLoad
from services.cli.bench.prompts import Asking, PromptLengths, Synthetic
from services.cli.bench.run import BenchRun
from services.cli.bench.stream_times import HEADINGS, StreamTimes
from services.common.flags import Examples, Int, Ints


class LatencyConfig(ServerFlags, RequestFlags, ResultFlags):
    """Start streams at the same moment, and show milliseconds per token and to the first token.

    Per token: from a stream's first text to its last, over its tokens less one; the median over all streams. To the
    first token: from the request, on an open connection, to its first text. No prompt is sent twice.
    """

    examples: ClassVar[Examples] = (
        ("", "1, 8 and 64 streams"),
        ("--streams 1,4,16 --prompt-tokens 1024 --output-tokens 64 --rounds 10 --json out.json", "longer prompts"),
    )

    timeout: Timeout = 600.0
    streams: Ints = Field((1, 8, 64), min_length=1, description="numbers of streams at once, measured in turn")
    rounds: Int = Field(5, ge=1, description="rounds of each, after one that does not count")
    prompt_tokens: PromptTokens = PromptLengths(128, 128)
    output_tokens: OutputTokens = PromptLengths(256, 256)

    @field_validator("streams", mode="before")
    @classmethod
    def _are_numbers(cls, value: str) -> str:
        if isinstance(value, str) and not all(part.strip().isdecimal() and int(part) for part in value.split(",")):
            raise ValueError("expected whole numbers above 0, such as 1,8,64")
        return value


def latency(config: LatencyConfig) -> int:
    """Measure, show the figures, and return the exit status. Raises ``ServerError``."""
    run = BenchRun.of("latency", config)
    fields = config.fields(ignore_eos=True)
    lengths = config.prompt_tokens, config.output_tokens
    body = Synthetic(Asking(run.model, fields=fields), run.settings["seed"], *lengths, config.vocab_size)
    by_count: dict[int, list[Reply]] = {}
    number = 0
    with Live(run.progress) as live:
        for count in config.streams:
            for number_of_round in range(config.rounds + 1):
                stage = f"round {number_of_round} of {config.rounds}" if number_of_round else "to warm up"
                outcome = run.drive(live, f"{count} at once, {stage}", OfferedLoad(body, count, number))
                number += count
                if number_of_round:
                    by_count.setdefault(count, []).extend(reply for _, reply in outcome.replies)

    title = f"{run.model} at {run.url}: {lengths[0]} tokens in, {lengths[1]} out"
    run.console.print(f"[bold]{escape(title)}[/]", highlight=False)
    table = Table(*(Column(heading, justify="right") for heading in HEADINGS))
    found = {}
    for count, replies in by_count.items():
        times = StreamTimes.of(replies)
        if times is not None:
            table.add_row(*times.row(count))
            found[str(count)] = asdict(times)
    run.console.print(table)
    every = [reply for replies in by_count.values() for reply in replies]
    figures = Figures.of(every, streamed=True)
    show_errors(run.console, figures)
    errors = {kind: asdict(each) for kind, each in figures.errors.items()}
    results = {"streams": found, "failed": figures.failed, "errors": errors}
    return run.finish(results, every, title, streamed=True, failed=figures.failed)
