"""Measure the throughput of a scheduler process: ``python -m bench.scheduler_capacity sequences=8192``.

Runs a fake worker that answers at once, a scheduler, and a client with one session, each as a process. Requests have
stop strings and GSM8K-like lengths. The same work also runs in one process without sockets, to measure the time of each
stage. Both run twice: with pages for all limits, and with a pool that is always full, so that every plan needs the
forecast and a bisection. The last line is one JSON object.
"""

import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import grpc
import numpy as np
from pydantic import Field

from bench.server import START_TIMEOUT_S, free_port, report
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.common.packed import read_fixed32
from services.common.plan.codec import decode_result, encode_plan
from services.common.plan.types import SamplingSettings, WorkerLimits
from services.common.rpc.channel import PLAIN
from services.common.text.tokenizer import Tokenizer
from services.launcher.readiness import grpc_ready
from services.scheduler.api.encoding import encode_outputs
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.stopping.automaton import Automaton
from tests.fakes.model import FakeModel, FakeShape
from tokasaurus.common.v1.sampling_pb2 import Sampling
from tokasaurus.scheduler.v1 import generate_pb2, scheduler_pb2_grpc, session_pb2

STOPS = ("\n\nQuestion:", "Question:", "</s>")
MAX_TOKENS, PROMPT_TOKENS, SAMPLES = 320, 100, 8
FULL_PAGES = 7  # of a sequence on average: those of its prompt are shared by eight


def worker_shape(sequences: int, full: bool) -> FakeShape:
    """Return the shape for ``sequences`` sequences. ``full``: pages for their mean lengths instead of their limits."""
    pages = sequences * -(-(MAX_TOKENS + PROMPT_TOKENS) // 16) + 64
    if full:
        pages = sequences * FULL_PAGES + 64
    return FakeShape(page_count=pages, max_slots=sequences, max_tokens_per_step=2 * sequences + 512, eos_every=150)


def prompt(number: int) -> np.ndarray:
    """Return the shared few-shot examples and the question of request ``number``."""
    tokens = np.arange(PROMPT_TOKENS) % 900 + 20
    tokens[-20:] = np.random.default_rng(number).integers(20, 2000, 20)
    return tokens.astype(np.uint32)


def submit_message(handle: int) -> session_pb2.SessionRequest:
    request = generate_pb2.GenerateRequest(
        tokens=generate_pb2.TokenPrompt(token_ids=prompt(handle)),
        stopping=generate_pb2.Stopping(max_tokens=MAX_TOKENS, strings=STOPS),
        n=SAMPLES,
    )
    return session_pb2.SessionRequest(submit=session_pb2.Submit(handle=handle, request=request))


async def deliver(address: str, sequences: int, seconds: float, full: bool) -> dict[str, float]:
    """Keep ``sequences`` requests in progress, and return the rates of delivered results."""
    async with PLAIN.open_aio(address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
        await call.write(session_pb2.SessionRequest(open=session_pb2.SessionOpen(client_id="bench")))
        submitted = finished = tokens = messages = 0
        begun = counted = steps = last_step = 0.0
        enough = 0.8 * sequences if full else 0.97 * sequences
        owed = sequences + sequences // 8
        outstanding = 0
        while True:
            while outstanding < owed:
                await call.write(submit_message(submitted))
                submitted += SAMPLES
                outstanding += SAMPLES
            message = await call.read()
            if message is grpc.aio.EOF:
                raise SystemExit(f"the session ended: {await call.code()} {await call.details()}")
            if message.WhichOneof("payload") == "rejection":
                raise SystemExit(f"rejected: {message.rejection.status.message}")
            if not begun and message.load.running_sequences >= enough:
                begun = time.perf_counter() + 1.0  # settle for a moment, then count
            if message.WhichOneof("payload") != "outputs":
                continue
            outputs = message.outputs
            finished += len(outputs.finished)
            outstanding -= len(outputs.finished)
            fresh = len(read_fixed32(outputs.token_ids))
            now = time.perf_counter()
            if not begun:
                continue
            if now < begun:
                last_step = outputs.step
                continue
            tokens += fresh
            messages += 1
            steps = outputs.step - last_step
            counted = now - begun
            if counted > seconds:
                call.cancel()
                return {"tokens_per_second": tokens / counted, "steps_per_second": steps / counted,
                        "messages_per_second": messages / counted, "finished": finished}  # fmt: skip


@contextmanager
def processes(shape: FakeShape, model: str = "builtin"):
    """Run worker and scheduler, and yield the scheduler's address. ``model`` needs no weights."""
    worker, scheduler = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = [f"{name}={int(value)}" for name, value in asdict(shape).items()]
    scheduler_flags = (f"model={model}", f"scheduler_listen={scheduler}", f"worker_addresses={worker}")
    children = [
        subprocess.Popen([sys.executable, "-m", "tests.fakes.worker", f"listen={worker}", *flags]),
        subprocess.Popen([sys.executable, "-m", "services.scheduler", *scheduler_flags]),
    ]
    try:
        asyncio.run(asyncio.wait_for(grpc_ready(scheduler), START_TIMEOUT_S))
        yield scheduler
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def stages(sequences: int, full: bool, steps: int = 200) -> dict[str, float]:
    """Return the milliseconds per step of each stage, in one process without sockets."""
    shape, vocabulary = worker_shape(sequences, full), Tokenizer.load("builtin").vocabulary
    core = Scheduler(vocabulary.token_bytes, shape.vocab_size, Policy(max_queued=10**9))
    sizes = (shape.page_size, shape.page_count, shape.max_slots, shape.max_tokens_per_step)
    core.attach(WorkerLimits(*sizes, max_context_tokens=2048, vocab_size=shape.vocab_size, hydragen=True))
    core.open_sink(1)
    model, automaton, spent = FakeModel(shape), Automaton(STOPS), defaultdict(float)
    handle = done = tokens = 0

    @contextmanager
    def timed(name: str):
        begun = time.perf_counter()
        yield
        spent[name] += time.perf_counter() - begun

    def turn() -> None:
        nonlocal handle, tokens
        with timed("submit"):
            while core.live(1) < sequences + sequences // 8:
                request = Request(f"r{handle}", prompt(handle), SamplingSettings(Sampling(seed=handle)), MAX_TOKENS)
                request.stop_token_ids, request.automaton = frozenset({0}), automaton
                request.n, request.sink, request.handle = SAMPLES, 1, handle
                core.submit(request, time.monotonic_ns())
                handle += SAMPLES
        with timed("plan"):
            plan = core.plan(time.monotonic_ns())
        with timed("encode_plan"):
            message = encode_plan(plan)
        answer = model.apply(message)
        with timed("decode_result"):
            result = decode_result(answer)
        with timed("take_result"):
            core.take(result, time.monotonic_ns())
        with timed("deliver"):
            for _, delta in core.take_output():
                tokens += len(delta.tokens)
                encode_outputs(delta).SerializeToString()

    while core.state.pool.slots.running < sequences and done < (500 if full else 4000):
        turn()
        done += 1
    for _ in range(50):
        turn()
    spent.clear()
    tokens = 0
    for _ in range(steps):
        turn()
    found = {name: 1000 * seconds / steps for name, seconds in spent.items()}
    found["total"] = sum(found.values())
    found["tokens_per_step"] = tokens / steps
    found["pages_in_use"] = core.state.pool.pages.in_use / core.state.pool.pages.size
    found["preemptions"] = core.state.queue.counters.preemptions
    return found


class BenchConfig(Config):
    """The flags."""

    sequences: Int = Field(8192, ge=1, description="running sequences")
    seconds: Float = Field(10.0, gt=0, description="duration of the measurement")


def main() -> None:
    config = from_command_line(BenchConfig)
    full = measure(config, full=True)
    easy = measure(config, full=False)
    report({"sequences": config.sequences, **easy, "full_pool": full})


def measure(config: BenchConfig, *, full: bool) -> dict[str, Any]:
    """Measure the stages, and then the processes."""
    milliseconds = stages(config.sequences, full)
    for name, value in milliseconds.items():
        print(f"{name:>16} {value:9.3f}")
    with processes(worker_shape(config.sequences, full)) as address:
        found = asyncio.run(asyncio.wait_for(deliver(address, config.sequences, config.seconds, full), 300))
    rounded = {name: round(value, 3) for name, value in milliseconds.items()}
    return {name: round(value, 3) for name, value in found.items()} | {"step_ms_by_stage": rounded}


if __name__ == "__main__":
    main()
