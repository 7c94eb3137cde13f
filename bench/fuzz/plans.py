"""The plan stream of a worker with a real model: histories of valid plans, interrupted by invalid plans and messages.

Two workers receive the same valid plans. One of them also receives plans that break the contract. It must refuse these
with a reason. On the next stream, it must give the same results as the other worker, with equal bits of tokens and
log-probabilities, from pages that it computed before.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc

from bench.fuzz.canary import random_of
from bench.fuzz.config import FuzzConfig
from bench.fuzz.findings import Findings, Wrong
from bench.fuzz.illegal import spoilt
from bench.fuzz.messages import damaged, mutated
from bench.fuzz.mirror import Mirror
from bench.fuzz.statuses import NEVER, is_ours
from bench.random_plans import RandomPlans
from bench.server import free_port
from services.common.plan.codec import decode_limits, encode_plan
from tests.gateway.deployment import Process
from tokasaurus.worker.v1 import plan_pb2, worker_pb2, worker_pb2_grpc

_PLANS = 30  # plans of a history
_ILLEGAL = 0.15  # probability of an invalid plan before a plan
_GARBAGE = 12  # streams of random messages after a history
_START_S = 300.0
_REFUSED = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION})
_SIZES = {
    "page_size": 16, "kv_cache_num_tokens": 2048, "max_seqs_per_forward": 8, "max_tokens_per_forward": 64,
    "max_context_tokens": 128, "torch_num_threads": 1, "device": "cpu", "dtype": "float32", "log_level": "WARNING",
}  # fmt: skip


class Worker:
    """A worker process with one stream at a time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.address = f"127.0.0.1:{free_port()}"
        self.process = Process(log, "services.worker", worker_listen=self.address, **_SIZES)
        self._channel = grpc.aio.insecure_channel(self.address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.raw = self._channel.stream_stream(
            "/tokasaurus.worker.v1.WorkerService/RunSteps", None, worker_pb2.RunStepsResponse.FromString
        )

    async def ready(self) -> worker_pb2.WorkerInfo:
        """Wait until the worker is ready, and return its properties."""
        async with asyncio.timeout(_START_S):
            while True:
                try:
                    self.info = (await self._stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
                    return self.info
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or not self.process.running:
                        raise
                    await asyncio.sleep(0.2)

    def hello(self) -> worker_pb2.Hello:
        """Return a valid hello."""
        return worker_pb2.Hello(
            scheduler_id="fuzz", expected_incarnation_id=self.info.incarnation_id, plans_in_flight=2
        )

    @asynccontextmanager
    async def stream(self) -> AsyncIterator["PlanStream"]:
        """Yield an open stream, which the client ends after the context."""
        call = self._stub.RunSteps()
        try:
            await call.write(worker_pb2.RunStepsRequest(hello=self.hello()))
            if await _read(call) is grpc.aio.EOF:
                raise Wrong("refused", f"a right hello: {await call.code()}: {await call.details()}")
            yield PlanStream(call)
        finally:
            call.cancel()

    async def stop(self) -> None:
        await self._channel.close()
        await asyncio.to_thread(self.process.stop)


class PlanStream:
    """A stream that sends one plan at a time."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def run(self, plan: plan_pb2.StepPlan) -> plan_pb2.StepResult:
        """Return the result of ``plan``. Raises ``Wrong`` if there is none."""
        await self._call.write(worker_pb2.RunStepsRequest(plan=plan))
        answer = await _read(self._call)
        if answer is grpc.aio.EOF:
            raise Wrong("refused", f"a legal plan: {await self._call.code()}: {await self._call.details()}")
        return answer.result

    async def refused(self, plan: plan_pb2.StepPlan, behind: plan_pb2.StepPlan) -> None:
        """Check that ``plan`` is refused and ``behind``, which follows it, does not run. Raises ``Wrong``."""
        together = worker_pb2.StepPlans(plans=(plan, behind))
        await self._call.write(worker_pb2.RunStepsRequest(plans=together))
        answer = await _read(self._call)
        if answer is not grpc.aio.EOF:
            raise Wrong("not refused", "an illegal plan was answered")
        code, details = await self._call.code(), await self._call.details()
        if code not in _REFUSED or not details:
            raise Wrong("status", f"an illegal plan: {code.name}: {details}")


class PlanFuzzer:
    """A fuzzer that compares a worker with a second worker, which receives only valid plans."""

    def __init__(self, config: FuzzConfig, directory: Path, findings: Findings) -> None:
        self._config, self._directory, self._findings = config, directory, findings
        self._sent = self._legal = 0
        self._illegal: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()

    async def run(self, count: int) -> dict[str, Any]:
        """Run histories until ``count`` messages are sent."""
        disturbed, alone = (Worker(self._directory / f"worker-{name}.log") for name in ("disturbed", "alone"))
        workers = (disturbed, alone)
        try:
            await asyncio.gather(*(worker.ready() for worker in workers))
            began, number = time.monotonic(), self._config.first
            while self._sent < count:
                try:
                    async with asyncio.timeout(self._config.answer_seconds * _PLANS):
                        await self._history(number, disturbed, alone)
                except (Wrong, TimeoutError, grpc.aio.AioRpcError) as error:
                    kind = (
                        error.kind
                        if isinstance(error, Wrong)
                        else "late"
                        if isinstance(error, TimeoutError)
                        else "status"
                    )
                    self._findings.add("plans", number, kind, f"history {number}: {error}", self._last)
                number += 1
                if ended := [worker for worker in workers if not worker.process.running]:
                    for worker in ended:
                        self._findings.add(
                            "services", -1, "crash", f"{worker.log.stem} ended with {worker.process.wait()}"
                        )
                    break
            seconds = time.monotonic() - began
        finally:
            for worker in workers:
                await worker.stop()
        for worker in workers:
            if "Traceback" in (log := worker.log.read_text(errors="replace")):
                self._findings.add(
                    "services", -1, "log", f"{worker.log.stem}: Traceback", answer=log[-100_000:].encode()
                )
        return {
            "requests": self._sent,
            "seconds": round(seconds, 1),
            "requests_per_second": round(self._sent / seconds, 1),
            "histories": number - self._config.first,
            "legal": self._legal,
            "illegal": dict(sorted(self._illegal.items())),
            "garbage": dict(sorted(self._statuses.items())),
        }

    async def _history(self, number: int, disturbed: Worker, alone: Worker) -> None:
        random, info, self._last = random_of(self._config.seed, "plans", number), disturbed.info, b""
        made = RandomPlans(decode_limits(info), random.getrandbits(30))
        plans = [encode_plan(made.next()[0]) for _ in range(_PLANS)]
        mirror = Mirror(info.max_context_tokens)
        while plans:
            async with disturbed.stream() as stream, alone.stream() as beside:
                plans = await self._go_on(random, info, mirror, plans, stream, beside)
        for _ in range(_GARBAGE):
            await self._garbage(random, disturbed, plans)

    async def _go_on(
        self,
        random: Random,
        info: worker_pb2.WorkerInfo,
        mirror: Mirror,
        plans: list[plan_pb2.StepPlan],
        stream: "PlanStream",
        beside: "PlanStream",
    ) -> list[plan_pb2.StepPlan]:
        """Run ``plans`` on both streams until an invalid plan is sent. Return the remaining plans."""
        answers = [await each.run(mirror.again()) for each in (stream, beside)]
        if len(answers[0].slots) or len(answers[1].slots):
            raise Wrong("other text", "a plan without a batch was answered with tokens")
        self._sent += 1
        for done, of_history in enumerate(plans):
            plan = mirror.next(of_history, done + 2)
            if random.random() < _ILLEGAL:
                name, broken = spoilt(random, plan, info, mirror.used)
                self._last = broken.SerializeToString()
                self._illegal[name] += 1
                self._sent += 2
                try:
                    await stream.refused(broken, plan)
                except Wrong as wrong:
                    raise Wrong(wrong.kind, f"{name}: {wrong}") from None
                return plans[done:]
            self._last = plan.SerializeToString()
            self._sent += 1
            self._legal += 1
            result, right = await stream.run(plan), await beside.run(plan)
            if _bare(result) != _bare(right):
                raise Wrong("other text", f"step {plan.step}: {_shown(result)}, not {_shown(right)}")
            mirror.apply(plan, result)
        return []

    async def _garbage(self, random: Random, worker: Worker, plans: list[plan_pb2.StepPlan]) -> None:
        """Send a stream of mutated, damaged and misplaced messages. Every status but INTERNAL is allowed."""
        messages = [worker_pb2.RunStepsRequest(hello=worker.hello())] if random.random() < 0.8 else []
        messages += [worker_pb2.RunStepsRequest(plan=plan) for plan in plans[: random.randrange(4)]]
        if random.random() < 0.3:
            messages.append(worker_pb2.RunStepsRequest(plans=worker_pb2.StepPlans(plans=plans[:2])))
        data = []
        for message in messages:
            for _ in range(random.choice((0, 0, 1, 3))):
                message = mutated(random, message)
            data.append(message.SerializeToString())
            if random.random() < 0.1:
                data[-1] = damaged(random, data[-1])
        self._last = b"".join(len(each).to_bytes(4, "big") + each for each in data)
        self._sent += max(1, len(data))
        call = worker.raw(iter(data))
        try:
            while await _read(call) is not grpc.aio.EOF:
                pass
            code, details = await call.code(), await call.details()
        finally:
            call.cancel()
        self._statuses[code.name] += 1
        if code in NEVER and not is_ours(details):
            raise Wrong("status", f"garbage: {code.name}: {details}")


async def _read(call: Any) -> Any:
    """Return the next answer, or ``EOF`` at the end of the stream or after an error."""
    try:
        return await call.read()
    except grpc.aio.AioRpcError:
        return grpc.aio.EOF


def _shown(result: plan_pb2.StepResult) -> str:
    return " ".join(str(result).split())


def _bare(result: plan_pb2.StepResult) -> bytes:
    """Return the computed part of a result."""
    bare = plan_pb2.StepResult()
    bare.CopyFrom(result)
    for name in ("step", "queued_plans", "timing"):
        bare.ClearField(name)
    return bare.SerializeToString()
