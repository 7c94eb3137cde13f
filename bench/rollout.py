"""Measure generation whose weights are replaced in every round: ``python -m bench.rollout [server_flags='model=...']``.

A round is many prompts with several samples each, of lengths with a long tail. When a share of its samples has ended,
the weights are replaced, and the next round is sent. Samples that still run continue with the new weights, so a few
long answers do not delay the next round. The program is a trainer over gRPC: it has one session with the scheduler.

Each update commits the weights of the model, or those of ``weights``, under a new name. Each answer names the weights
of its tokens. The program fails if these are not committed weights in their order, for all tokens, none older than the
request. The last line is one JSON object.
"""

import asyncio
import shlex
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PlainValidator, model_validator

from bench.gpus import EnergyMeter, Gpus
from bench.server import report, serve
from services.cli.bench.prompts import PromptLengths
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.common.model.files import resolve
from services.common.packed import read_fixed32
from services.common.rpc.channel import PLAIN
from tokasaurus.scheduler.v1 import control_pb2, generate_pb2, scheduler_pb2_grpc, session_pb2

MOST_SUBMITS = 1024  # in one message
# A flag: 256, 128-512, or lognormal:MEDIAN,SIGMA,MAXIMUM.
Lengths = Annotated[PromptLengths, PlainValidator(lambda value: PromptLengths.parse(str(value)))]
NEVER = np.iinfo(np.int64).max


class RolloutConfig(Config):
    """The flags. Figures of rounds differ with the seed only in prompts and lengths."""

    server_flags: str = Field("", description="flags of the server, quoted as in a shell: 'model=... tp_size=2'")
    weights: str | None = Field(None, description="directory of the weights to commit; default: that of the model")
    rounds: Int = Field(3, ge=1)
    prompts: Int = Field(64, ge=1, description="prompts in a round")
    samples: Int = Field(16, ge=1, description="samples of each prompt")
    requests_per_prompt: Int = Field(4, ge=1, description="requests that share them; those of a request end together")
    update_at: Float = Field(0.75, gt=0, le=1, description="share of a round's samples that end before the update")
    prompt_tokens: Int = Field(64, ge=1)
    output_tokens: Lengths = Field(
        PromptLengths.parse("lognormal:50,0.9,600"), description="256, 128-512, or lognormal:MEDIAN,SIGMA,MAXIMUM"
    )
    vocab_size: Int = Field(2000, ge=3, description="prompts are random token ids below it")
    seed: Int = 0

    @model_validator(mode="after")
    def _parts(self) -> "RolloutConfig":
        if self.samples % self.requests_per_prompt:
            raise ValueError(f"flag requests_per_prompt={self.requests_per_prompt}: does not divide {self.samples}")
        return self


@dataclass
class Update:
    """A commit. Times are in seconds of ``time.perf_counter``, or their differences."""

    version: str
    stage_s: float
    called_at: float
    commit_s: float
    paused_s: float  # no worker computed


@dataclass
class Rollouts:
    """All samples, numbered by their handles, and all updates."""

    config: RolloutConfig
    directory: str  # of the weights
    stub: Any
    call: Any  # the session
    updates: list[Update] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)  # number of committed updates when a sample was sent
    finishes: dict[int, generate_pb2.Finish] = field(default_factory=dict)
    outputs: list[tuple[float, np.ndarray, np.ndarray]] = field(default_factory=list)  # time, handles, token counts
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def send_round(self, rng: np.random.Generator) -> range:
        """Send the requests of a round. Return the handles of its samples."""
        config, first = self.config, len(self.newest)
        n = config.samples // config.requests_per_prompt
        submits = []
        for _ in range(config.prompts):
            token_ids = rng.integers(2, config.vocab_size, config.prompt_tokens)
            prompt = generate_pb2.TokenPrompt(token_ids=token_ids)
            for _ in range(config.requests_per_prompt):
                stopping = generate_pb2.Stopping(max_tokens=config.output_tokens.draw(rng), ignore_eos=True)
                request = generate_pb2.GenerateRequest(tokens=prompt, stopping=stopping, n=n)
                submits.append(session_pb2.Submit(handle=len(self.newest), request=request))
                self.newest += [len(self.updates)] * n
        for begin in range(0, len(submits), MOST_SUBMITS):
            some = session_pb2.Submits(submits=submits[begin : begin + MOST_SUBMITS])
            await self.call.write(session_pb2.SessionRequest(submits=some))
        return range(first, len(self.newest))

    async def update(self) -> None:
        """Stage and commit weights under a new name, while samples run."""
        version, began = f"update-{len(self.updates)}", time.perf_counter()
        staging = control_pb2.StageWeightsRequest(directory=self.directory, version=version)
        staged = await self.stub.StageWeights(staging)
        called = time.perf_counter()
        committing = control_pb2.CommitWeightsRequest(update_id=staged.update_id, mode=control_pb2.PAUSE_MODE_KEEP)
        committed = await self.stub.CommitWeights(committing)
        took = time.perf_counter() - called
        self.updates.append(Update(version, called - began, called, took, committed.paused_ns * 1e-9))

    async def until_ended(self, handles: range, share: float = 1.0) -> None:
        """Wait until a share of samples has ended."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: sum(handle in self.finishes for handle in handles) >= share * len(handles)
            )

    async def read(self) -> None:
        """Collect tokens and ends until the session is cancelled."""
        async for message in self.call:
            if message.WhichOneof("payload") == "rejection":
                raise SystemExit(f"rejected: {message.rejection.status.message}")
            if message.WhichOneof("payload") != "outputs":
                continue
            handles = read_fixed32(message.outputs.handles)
            counts = read_fixed32(message.outputs.token_counts)
            self.outputs.append((time.perf_counter(), handles, counts if len(counts) else np.ones_like(handles)))
            if message.outputs.finished:
                async with self.changed:
                    self.finishes.update((each.handle, each.finish) for each in message.outputs.finished)
                    self.changed.notify_all()


def main() -> None:
    config = from_command_line(RolloutConfig)
    flags = dict(flag.split("=", 1) for flag in shlex.split(config.server_flags))
    directory = Path(config.weights or resolve(flags.get("model", "builtin"), weights=True)).resolve()
    with serve(**flags, weight_directories=directory) as server:
        meter = EnergyMeter(Gpus.visible())
        rollouts, seconds = asyncio.run(measure(config, str(directory), server.grpc_address))
        figures = summarize(rollouts, seconds)
        figures |= meter.per_token(figures["tokens"])
    wrong = find_wrong(rollouts)
    figures["wrong"] = len(wrong)
    for name, value in figures.items():
        print(f"{name:>25} {value if value is None or isinstance(value, int) else round(value, 4)}")
    report(figures)
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(rollouts.newest)} samples are wrong, the first: {wrong[0]}")


async def measure(config: RolloutConfig, directory: str, address: str) -> tuple[Rollouts, float]:
    """Run all rounds. Return their samples, and the seconds from the first request to the last token."""
    async with PLAIN.open_aio(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Session()
        await call.write(session_pb2.SessionRequest(open=session_pb2.SessionOpen(client_id="bench")))
        rollouts = Rollouts(config, directory, stub, call)
        await rollouts.update()  # so that all tokens have a version with a name
        reading = asyncio.create_task(rollouts.read())
        running = asyncio.create_task(_run(rollouts))
        await asyncio.wait((reading, running), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await reading  # raises the reason
            raise SystemExit("the scheduler ended the session")
        call.cancel()
        await asyncio.wait((reading,))
        return rollouts, await running


async def _run(rollouts: Rollouts) -> float:
    """Run all rounds. Return their seconds."""
    rng, began = np.random.default_rng(rollouts.config.seed), time.perf_counter()
    for _ in range(rollouts.config.rounds):
        handles = await rollouts.send_round(rng)
        await rollouts.until_ended(handles, rollouts.config.update_at)
        await rollouts.update()
    await rollouts.until_ended(range(len(rollouts.newest)))
    return time.perf_counter() - began


def find_wrong(rollouts: Rollouts) -> list[str]:
    """Return a sentence for each sample whose end or versions are not what they must be."""
    numbers = {update.version: number for number, update in enumerate(rollouts.updates)}
    found = []
    for handle, finish in sorted(rollouts.finishes.items()):
        spans = [(span.version, span.tokens) for span in finish.weights]
        order = [numbers.get(version, -1) for version, _ in spans]
        right = (
            finish.reason == generate_pb2.FINISH_REASON_LENGTH
            and sum(tokens for _, tokens in spans) == finish.usage.completion_tokens
            and order == sorted(set(order))
            and order[:1] >= [rollouts.newest[handle] - 1]
        )
        if not right:
            reason = generate_pb2.FinishReason.Name(finish.reason)
            found.append(
                f"sample {handle}: {reason} with {finish.usage.completion_tokens} tokens, of the versions {spans};"
                f" {rollouts.newest[handle]} updates were committed when it was sent"
            )
    return found


def summarize(rollouts: Rollouts, seconds: float) -> dict[str, Any]:
    """Return the figures. Times are of the updates while samples ran, as means over them."""
    updates = rollouts.updates[1:]
    firsts = first_tokens(rollouts)
    waits = [1e3 * (firsts[each.version] - each.called_at) for each in updates if each.version in firsts]
    tokens = sum(finish.usage.completion_tokens for finish in rollouts.finishes.values())
    n = rollouts.config.samples // rollouts.config.requests_per_prompt
    spanning = {handle // n for handle, finish in rollouts.finishes.items() if len(finish.weights) > 1}
    return {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "updates": len(updates),
        "paused_share": sum(each.paused_s for each in updates) / seconds,
        "paused_ms": 1e3 * statistics.mean(each.paused_s for each in updates),
        "stage_ms": 1e3 * statistics.mean(each.stage_s for each in updates),
        "commit_ms": 1e3 * statistics.mean(each.commit_s for each in updates),
        "commit_to_first_token_ms": statistics.mean(waits) if waits else None,
        "spanning_share": len(spanning) / (len(rollouts.newest) // n),
    }


def first_tokens(rollouts: Rollouts) -> dict[str, float]:
    """Return the time at which the first token of each version arrived."""
    begins = {each.version: np.full(len(rollouts.newest), NEVER) for each in rollouts.updates}  # tokens before it
    for handle, finish in rollouts.finishes.items():
        before = 0
        for span in finish.weights:
            if span.version in begins:
                begins[span.version][handle] = before
            before += span.tokens
    found: dict[str, float] = {}
    received = np.zeros(len(rollouts.newest), np.int64)
    for at, handles, counts in rollouts.outputs:
        received[handles] += counts
        for version in [name for name, begin in begins.items() if (received > begin)[handles].any()]:
            found[version] = at
            del begins[version]
    return found


if __name__ == "__main__":
    main()
