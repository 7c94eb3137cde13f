"""``toka-bench latency``: streams that begin together."""

from dataclasses import asdict

import typer
from rich.markup import escape
from rich.table import Column, Table

from services.cli.bench.commands import options as its
from services.cli.bench.display import Live, show_errors
from services.cli.bench.exchange import Reply
from services.cli.bench.figures import Figures
from services.cli.bench.load import Load
from services.cli.bench.prompts import Asking, Lengths, Synthetic
from services.cli.bench.run import Run
from services.cli.bench.stream_times import HEADINGS, StreamTimes

EXAMPLES = (
    "toka-bench latency",
    "toka-bench latency --streams 1,4,16 --prompt-tokens 1024 --output-tokens 64 --rounds 10 --json out.json",
)
_STREAMS = its.Counts((1, 8, 64))
_PROMPT, _OUTPUT = Lengths(128, 128), Lengths(256, 256)


def latency(
    context: typer.Context,
    url: its.Url = its.DEFAULT_URL,
    model: its.Model = None,
    api_key: its.ApiKey = None,
    ca: its.Ca = None,
    timeout: its.Timeout = 600.0,
    clients: its.Clients = 1,
    streams: its.Streams = _STREAMS,
    rounds: its.Rounds = 5,
    prompt_tokens: its.PromptTokens = _PROMPT,
    output_tokens: its.OutputTokens = _OUTPUT,
    vocab_size: its.VocabSize = None,
    ignore_eos: its.IgnoreEos = None,
    temperature: its.Temperature = 0.6,
    extra_body: its.ExtraBody = None,
    seed: its.Seed = None,
    json_to: its.Json = None,
    plot_to: its.Plot = None,
) -> None:
    """Streams that begin at the same moment, in rounds: milliseconds per token and to the first one.

    Per token: of a stream, from its first text to its last, over its tokens less one; the median over all streams. To
    the first token: from the request, on a connection that is open, to its first text. No prompt comes twice.
    """
    run = Run.of("latency", context.params)
    fields = its.fields(temperature, ignore_eos is not False, extra_body)
    body = Synthetic(Asking(run.model, fields=fields), run.settings["seed"], prompt_tokens, output_tokens, vocab_size)
    by_count: dict[int, list[Reply]] = {}
    number = 0
    with Live(run.progress) as live:
        for count in streams.values:
            for turn in range(rounds + 1):
                what = f"{count} at once, round {turn} of {rounds}" if turn else f"{count} at once, to warm up"
                outcome = run.drive(live, what, Load(body, count, number))
                number += count
                if turn:
                    by_count.setdefault(count, []).extend(reply for _, reply in outcome.replies)

    title = f"{run.model} at {run.url}: {prompt_tokens} tokens in, {output_tokens} out"
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
    raise typer.Exit(run.end(results, every, title, streamed=True, failed=figures.failed))
