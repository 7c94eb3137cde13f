"""``toka-bench serve``: measures many different requests."""

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from services.cli.bench.commands.options import (
    ExistingFile,
    OutputTokens,
    PromptTokens,
    RequestFlags,
    ResultFlags,
    ServerFlags,
    Timeout,
    read,
)
from services.cli.bench.display import Live
from services.cli.bench.load import OfferedLoad, poisson
from services.cli.bench.prompts import Asking, PromptLengths, make_bodies, read_rows
from services.cli.bench.run import BenchRun
from services.common.flags import Bool, Examples, Excludes, FlagError, Float, Int, Needs

_REQUESTS, _CONCURRENCY = 100, 16


class ServeConfig(ServerFlags, RequestFlags, ResultFlags):
    """Send many different requests: as they arrive at a rate, or with a fixed concurrency.

    Shows requests and tokens a second, and the times to the first token, between tokens, and to the end.
    """

    examples: ClassVar[Examples] = (
        ("--rate 4 --duration 60", "Poisson arrivals for a minute"),
        (
            "--concurrency 64 --requests 500 --prompt-tokens lognormal:99,1.2,2048 --output-tokens 16-256",
            "lengths that differ",
        ),
        (
            "--url https://host/v1 --chat --dataset chats.jsonl --field messages --json out.json",
            "the chats of a file",
        ),
    )

    timeout: Timeout = 600.0
    rate: Annotated[Float | None, Excludes("concurrency")] = Field(
        None, ge=1e-6, description="requests a second, as a Poisson process that does not wait for answers"
    )
    concurrency: Int | None = Field(
        None, ge=1, description="requests at once: when one ends, the next is sent; default without rate=: 16"
    )
    requests: Int | None = Field(None, ge=1, description="number of requests; default without duration=: 100")
    duration: Float | None = Field(
        None, ge=0.001, description="seconds after which no request begins; those that run are waited for"
    )
    warmup: Int = Field(1, ge=0, description="requests beforehand, which do not count")
    chat: Bool = Field(False, description="send to /v1/chat/completions, not /v1/completions")
    stream: Bool = Field(True, description="request streams; F: whole answers")
    prompt_tokens: PromptTokens = PromptLengths(256, 256)
    output_tokens: OutputTokens = PromptLengths(128, 128)
    dataset: ExistingFile | None = Field(
        None, description="JSON lines with a prompt in each, instead of made-up prompts"
    )
    field: Annotated[str, Needs("dataset")] = Field(
        "prompt", description="where a line of the dataset has its prompt, or a chat's messages; a.b: in an object"
    )


def serve(config: ServeConfig) -> int:
    """Measure, show the figures, and return the exit status. Raises ``FlagError`` and ``ServerError``."""
    dataset, chat, rate, duration = config.dataset, config.chat, config.rate, config.duration
    prompts = None if dataset is None else read(lambda: read_rows(dataset, config.field))
    if prompts is not None and isinstance(prompts[0], list) and not chat:
        raise FlagError(f"flag dataset={dataset}: {config.field!r} holds messages: add --chat")

    run = BenchRun.of("serve", config, chat=chat)
    seed: int = run.settings["seed"]
    asking = Asking(run.model, chat, config.stream, config.fields(ignore_eos=prompts is None))
    body = make_bodies(asking, seed, prompts, config.prompt_tokens, config.output_tokens, config.vocab_size)
    count = config.requests or (None if duration is not None else _REQUESTS)
    arrivals, concurrency = None, None
    if rate is not None:
        # Another random stream than those of requests, which are seeded with (seed, number).
        arrivals = poisson(rate, np.random.default_rng((seed, 0, 1)), count, duration)
        count = len(arrivals)
        if not count:
            raise FlagError(f"flag duration={duration:g}: no request arrives in it at rate={rate:g}; raise one of them")
        title = f"{rate:g} requests/s"
    else:
        concurrency = config.concurrency or _CONCURRENCY
        title = f"{concurrency} at once"
    with Live(run.progress) as live:
        run.warm_up(live, body, 0, config.warmup)
        load = OfferedLoad(body, count, config.warmup, arrivals, concurrency, duration)
        outcome = run.drive(live, title, load)
    return run.report(outcome, f"{run.model} at {run.url}: {title}", streamed=config.stream)
