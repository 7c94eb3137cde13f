"""``toka-bench serve``: many requests that differ."""

import numpy as np
import typer

from services.cli.bench.commands import options as its
from services.cli.bench.display import Live
from services.cli.bench.load import Load, poisson
from services.cli.bench.prompts import Asking, Lengths, made_up_or_read, read_rows
from services.cli.bench.run import Run

EXAMPLES = (
    "toka-bench serve --rate 4 --duration 60",
    "toka-bench serve --concurrency 64 --requests 500 --prompt-tokens lognormal:99,1.2,2048 --output-tokens 16-256",
    "toka-bench serve --url https://host/v1 --chat --dataset chats.jsonl --field messages --json out.json",
)
_PROMPT, _OUTPUT = Lengths(256, 256), Lengths(128, 128)
_REQUESTS, _CONCURRENCY = 100, 16


def serve(
    context: typer.Context,
    url: its.Url = its.DEFAULT_URL,
    model: its.Model = None,
    api_key: its.ApiKey = None,
    ca: its.Ca = None,
    timeout: its.Timeout = 600.0,
    clients: its.Clients = 1,
    rate: its.Rate = None,
    concurrency: its.Concurrency = None,
    requests: its.Requests = None,
    duration: its.Duration = None,
    warmup: its.WarmUp = 1,
    chat: its.Chat = False,
    stream: its.Stream = True,
    prompt_tokens: its.PromptTokens = _PROMPT,
    output_tokens: its.OutputTokens = _OUTPUT,
    vocab_size: its.VocabSize = None,
    dataset: its.Dataset = None,
    field: its.Field = "prompt",
    ignore_eos: its.IgnoreEos = None,
    temperature: its.Temperature = 0.6,
    extra_body: its.ExtraBody = None,
    seed: its.Seed = None,
    json_to: its.Json = None,
    plot_to: its.Plot = None,
) -> None:
    """Many requests that differ: as they arrive at a --rate, or so many at once (--concurrency).

    Shows requests and tokens a second, and how long it took to the first token, from token to token, and to the end.
    """
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("--rate and --concurrency: give one of them, arrivals or a closed loop")
    if chat and vocab_size is not None:
        raise typer.BadParameter("--vocab-size: a chat's messages are text; leave it out, or --chat")
    its.refuse_beside(context, dataset, "field")
    prompts = None if dataset is None else its.read(lambda: read_rows(dataset, field))
    if prompts is not None and isinstance(prompts[0], list) and not chat:
        raise typer.BadParameter(f"--dataset: {field!r} holds messages: add --chat")

    run = Run.of("serve", context.params, chat=chat)
    drawn: int = run.settings["seed"]
    eos = ignore_eos if ignore_eos is not None else prompts is None
    asking = Asking(run.model, chat, stream, its.fields(temperature, eos, extra_body))
    body = made_up_or_read(asking, drawn, prompts, prompt_tokens, output_tokens, vocab_size)
    count = requests or (None if duration is not None else _REQUESTS)
    arrivals = None
    if rate is not None:
        # A stream of its own: requests draw from (seed, number).
        arrivals = poisson(rate, np.random.default_rng((drawn, 0, 1)), count, duration)
        count = len(arrivals)
        if not count:
            raise typer.BadParameter(f"--duration {duration:g}: nothing arrives in it at --rate {rate:g}")
        what = f"{rate:g} requests/s"
    else:
        concurrency = concurrency or _CONCURRENCY
        what = f"{concurrency} at once"
    with Live(run.progress) as live:
        run.warm_up(live, body, 0, warmup)
        load = Load(body, count, warmup, arrivals, concurrency, duration)
        outcome = run.drive(live, what, load)
    raise typer.Exit(run.tell(outcome, f"{run.model} at {run.url}: {what}", streamed=stream))
