"""Measure the idle time of a worker while thousands of requests arrive: ``python -m bench.ingest [rate=2500]``.

Runs a scheduler, a session that submits the prompts of ``bench.traces.mix``, all at once or at ``rate``, and a fake
worker whose steps take as long as those of a device. Each is a process. With few cores, the work of the client and the
worker affects the figures. The last line is one JSON object.
"""

import asyncio
import multiprocessing
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
from pydantic import Field

from bench.server import START_TIMEOUT_S, free_port, report
from bench.traces import mix
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.common.model.files import ModelCard, read_card
from services.common.rpc.channel import PLAIN
from services.launcher.readiness import grpc_ready
from services.scheduler.__main__ import main as run_scheduler
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker
from tokasaurus.scheduler.v1 import generate_pb2, session_pb2

SESSION = "/tokasaurus.scheduler.v1.SchedulerService/Session"
LONGEST = 1000  # tokens of a prompt, and of an answer; the built-in model's context holds both


class IngestConfig(Config):
    """The flags."""

    requests: Int = Field(8192, ge=1)
    rate: Float = Field(0.0, ge=0, description="requests per second; 0 = all at once")
    seconds: Float = Field(6.0, ge=1, description="duration of the measurement, from the first plan on")
    token_us: Float = Field(4.0, ge=0, description="time of each token of a step")
    step_ms: Float = Field(1.0, ge=0, description="fixed time of a step")
    max_tokens_per_step: Int = Field(16384, ge=1)


@dataclass
class Step:
    """The times of a step by ``time.monotonic``, which all processes of a host share."""

    arrived: float  # arrival of the plan
    began: float
    ended: float
    tokens: int


class TimedWorker(FakeWorker):
    """A fake worker that answers a plan when a device would complete it."""

    def __init__(self, shape: FakeShape, token_s: float, step_s: float) -> None:
        super().__init__(shape)
        self.takes_together = False  # each result is sent at its own time
        self.steps: list[Step] = []
        self._token_s, self._fixed_s = token_s, step_s
        self._arrived: deque[float] = deque()

    async def _read(self, request_iterator, plans: asyncio.Queue, most: int) -> None:
        async def noted():
            async for request in request_iterator:
                self._arrived.append(time.monotonic())
                yield request

        await super()._read(noted(), plans, most)

    async def _next_result(self, plans: asyncio.Queue, end: asyncio.Future):
        result = await super()._next_result(plans, end)
        if result is None:
            return None
        arrived = self._arrived.popleft()
        free = self.steps[-1].ended if self.steps else arrived
        began = max(arrived, free)
        tokens = int(self.model.checker.last.batch.token_counts.sum())
        self.steps.append(Step(arrived, began, began + self._fixed_s + tokens * self._token_s, tokens))
        result.timing.device_ns = int((self.steps[-1].ended - began) * 1e9)
        result.timing.idle_ns = int((began - free) * 1e9)
        await asyncio.sleep(max(0.0, self.steps[-1].ended - time.monotonic()))
        return result


def worker_process(address: str, shape: FakeShape, token_s: float, step_s: float, pipe: Connection) -> None:
    """Run a worker that sends its steps for each message of ``pipe``."""

    async def run() -> None:
        worker = TimedWorker(shape, token_s, step_s)
        await worker.start(address)
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send((worker.steps, worker.violations))

    asyncio.run(run())


def scheduler_process(flags: list[str], pipe: Connection) -> None:
    """Run a scheduler that sends the CPU seconds of its threads, by name, for each message of ``pipe``."""

    def answer() -> None:
        while True:
            pipe.recv()
            pipe.send({thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                       for thread in threading.enumerate()} | {"all": time.process_time()})  # fmt: skip

    threading.Thread(target=answer, daemon=True).start()
    sys.argv = ["scheduler", *flags]
    run_scheduler()


class Client:
    """A session that submits all requests and counts the accepted ones."""

    def __init__(self, messages: list[bytes], rate: float) -> None:
        self._messages, self._rate = messages, rate
        self._accepted = 0
        self._all_accepted = asyncio.Event()

    async def run(self, address: str, seconds: float) -> dict[str, float]:
        """Submit the requests. Return times in seconds since the first request. Keep the session for ``seconds``."""
        async with PLAIN.open_aio(address) as channel:
            call = channel.stream_stream(SESSION, request_serializer=None, response_deserializer=None)()
            await call.write(session_pb2.SessionRequest(open=session_pb2.SessionOpen()).SerializeToString())
            await call.read()
            reader = asyncio.create_task(self._read(call))
            begun = time.monotonic()
            await self._send(call, begun)
            sent = time.monotonic()
            await self._all_accepted.wait()
            accepted = time.monotonic()
            await asyncio.sleep(max(0.0, begun + seconds - accepted))
            reader.cancel()
            call.cancel()
        return {"begun": begun, "all_sent_s": sent - begun, "all_accepted_s": accepted - begun}

    async def _send(self, call: grpc.aio.StreamStreamCall, begun: float) -> None:
        for number, message in enumerate(self._messages):
            if self._rate and (early := begun + number / self._rate - time.monotonic()) > 0.001:
                await asyncio.sleep(early)
            await call.write(message)

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while (data := await call.read()) is not grpc.aio.EOF:
            kind = session_pb2.SessionResponse.FromString(data).WhichOneof("payload")
            if kind == "rejection":
                raise SystemExit("a request was rejected")
            self._accepted += kind == "acceptance"
            if self._accepted == len(self._messages):
                self._all_accepted.set()


def submits(config: IngestConfig, card: ModelCard) -> list[bytes]:
    """Return the messages that a gateway sends for ``bench.mixed``."""
    messages = []
    for handle, request in enumerate(mix(config.requests).requests):
        tokens = request.tokens[:LONGEST] % (card.vocab_size - 1) + 1
        asked = generate_pb2.GenerateRequest(
            request_id=f"cmpl-{handle:032x}",
            model=card.name,
            tokens=generate_pb2.TokenPrompt(token_ids=tokens),
            sampling=generate_pb2.Sampling(temperature=0.6),
            stopping=generate_pb2.Stopping(max_tokens=min(request.max_tokens, LONGEST), ignore_eos=True),
            n=1,
            priority=generate_pb2.PRIORITY_CLASS_NORMAL,
        )
        submit = session_pb2.Submit(handle=handle, request=asked)
        messages.append(session_pb2.SessionRequest(submit=submit).SerializeToString())
    return messages


@contextmanager
def child(target: Callable[..., None], *arguments: Any):
    """Start a process with a pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()


def ask(pipe: Connection) -> Any:
    pipe.send(None)
    return pipe.recv()


def idle_shares(steps: list[Step], seconds: int) -> list[float]:
    """Return the share of idle time of the worker in each second since the first plan."""
    starts = steps[0].began + np.arange(seconds)[:, None]
    began, ended = np.array([(step.began, step.ended) for step in steps]).T
    busy = np.clip(np.minimum(ended, starts + 1) - np.maximum(began, starts), 0, None).sum(axis=1)
    return (1 - busy).round(3).tolist()


async def exchange(address: str, messages: list[bytes], config: IngestConfig) -> dict[str, float]:
    return await Client(messages, config.rate).run(address, config.seconds + 0.5)


def main() -> None:
    config = from_command_line(IngestConfig)
    card = read_card("builtin")
    shape = FakeShape(
        vocab_size=card.vocab_size, page_count=32 * config.requests + 256, max_slots=max(config.requests, 64),
        max_tokens_per_step=config.max_tokens_per_step, max_context_tokens=card.max_context_tokens,
    )  # fmt: skip
    messages = submits(config, card)
    at_worker, at_scheduler = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = [f"scheduler_listen={at_scheduler}", f"worker_addresses={at_worker}", "model=builtin", "log_level=WARNING"]
    times = (config.token_us * 1e-6, config.step_ms * 1e-3)
    with child(worker_process, at_worker, shape, *times) as worker, child(scheduler_process, flags) as scheduler:
        asyncio.run(asyncio.wait_for(grpc_ready(at_scheduler), START_TIMEOUT_S))
        before = ask(scheduler)
        client = asyncio.run(exchange(at_scheduler, messages, config))
        after = ask(scheduler)
        steps, violations = ask(worker)
    if violations:
        raise SystemExit(f"violations: {violations}")
    steps = [step for step in steps if step.began < steps[0].began + config.seconds]
    gaps = [later.began - earlier.ended for earlier, later in pairwise(steps)]
    idle = idle_shares(steps, int(config.seconds))
    cpu_us = {name: (seconds - before.get(name, 0.0)) / config.requests * 1e6 for name, seconds in after.items()}
    report(
        {
            "idle_s": round(sum(idle), 3),
            "idle_by_second": idle,
            "largest_gap_ms": round(max(gaps, default=0.0) * 1e3, 1),
            "steps": len(steps),
            "first_plan_s": round(steps[0].arrived - client.pop("begun"), 3),
            **{name: round(seconds, 3) for name, seconds in client.items()},
            "cpu_us_per_request": {name: round(value) for name, value in cpu_us.items() if value >= 1},
        }
    )


if __name__ == "__main__":
    main()
