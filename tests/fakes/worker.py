"""A deterministic fake worker behind a real gRPC server: no torch, no model, no waiting.

In a test: ``worker = FakeWorker(FakeShape(...)); address = await worker.start("127.0.0.1:0")``. As a process:
``python -m tests.fakes.worker listen=127.0.0.1:10410 eos_every=50``. Its flags are the fields of ``FakeShape``, and
``reply_ids=5,6,7`` to answer every prompt with these tokens, ``parrot_ids=2,4,3`` to repeat the user's text
(``parrot_script``), ``step_ms=20`` and ``token_us=80`` for the time of a step and of each of its tokens, ``poison=9``
to exit when this token appears, and ``otlp_endpoint=URL`` to send spans of prefills as a worker does.
"""

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace

import grpc

from services.common.config import WorkerConfig
from services.common.errors import FailedPrecondition, InvalidRequest, TokaError, Unavailable
from services.common.memory_parts import MemoryPart, Parts, check_level, read_parts, write_parts
from services.common.plan.result import Timing
from services.common.process.tracing import Tracing
from services.common.rpc.server import RpcServer
from services.worker.engine.traces import PrefillTraces
from tests.fakes.broadcasts import FakeBroadcasts
from tests.fakes.model import FakeModel, FakeShape, Script, Violation, parrot_script, reply_script
from tests.fakes.tensors import FakeTensors
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import plan_pb2, sleep_pb2, worker_pb2, worker_pb2_grpc
from tokasaurus.worker.v1 import weights_pb2 as worker_weights_pb2

SERVICE = "tokasaurus.worker.v1.WorkerService"


class _Plans(asyncio.Queue):
    """Those of one stream that wait; None = no more."""

    unanswered = 0


class FakeWorker(FakeTensors, FakeBroadcasts, worker_pb2_grpc.WorkerServiceServicer):
    """One worker at one address, alone or as one rank of several. Owned and driven by one asyncio loop.

    ``violations`` collects broken contracts: a test asserts that it stays empty.
    """

    def __init__(self, shape: FakeShape | None = None, script: Script | None = None, step_s: float = 0.0) -> None:
        super().__init__()
        self.shape = shape or FakeShape()
        self.script = script
        self.step_s = step_s
        self.token_s = 0.0  # that each token of a step takes beside `step_s`
        self.model = FakeModel(self.shape, script)
        self.violations: list[str] = []
        self.takes_together = True  # plans, and gives results, several in a message; an older worker does not
        self.largest_message = 0  # most plans that came in one
        self.plans, self.record = [], False  # every StepPlan received, when `record` is set
        self.streams = 0
        self.stream_ids: list[str] = []  # what the hellos said
        self.farewells = 0  # streams whose client said that there are no more plans
        self.at_rest = asyncio.Event()  # there is no stream
        self.at_rest.set()
        self.answered = 0
        self.most_unanswered = 0  # plans, of any stream
        self.fail_tokens: dict[int, str] = {}  # a prompt that begins with this token: its slot fails
        self.poison: int | None = None  # when this token appears, in a prompt or an answer, `end_of` is what happens
        self.end_of: Callable[[], None] = self.crash
        self.deaths = 0
        self.traces: PrefillTraces | None = None
        self.incarnation_id = uuid.uuid4().hex
        self.weights = weights_pb2.Weights()
        self.disk: dict[str, int] = {}  # content of directories, beside "/weights/N", which has the weights N
        self.staged: worker_weights_pb2.StageWeightsRequest | None = None
        self.on_stage: Callable[[], Awaitable[object] | None] = lambda: None  # called before the files are read
        self.on_discard: Callable[[], Awaitable[object] | None] = lambda: None  # called before the files are removed
        self.on_commit: Callable[[], Awaitable[object] | None] = lambda: None  # called before the weights are written
        self.asleep: Parts = frozenset()
        self.on_sleep: Callable[[], Awaitable[object] | None] = lambda: None  # called before it falls asleep
        self.on_wake: Callable[[], Awaitable[object] | None] = lambda: None  # called before it wakes
        self.asked = 0  # calls of GetWorkerInfo
        self._loading = False
        self._open = asyncio.Event()  # answers go out while it is set
        self._open.set()
        self._permits = 0
        self._holds = False  # a plan waits for ``release``
        self._progress = asyncio.Condition()
        self._received = 0
        self._stream: asyncio.Task | None = None
        self._end: asyncio.Future | None = None
        self._server: RpcServer | None = None

    # -- lifetime

    async def start(self, address: str = "127.0.0.1:0", *, loading: bool = False) -> str:
        """Listen; returns the real address. ``loading``: it is not ready until ``load``."""
        self._loading = loading
        self._server = RpcServer(SERVICE)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.grpc_server)
        self.address = await self._server.start(address)
        await self._server.set_ready(not loading)
        return self.address

    async def load(self) -> None:
        """Become ready, as a worker that has loaded its model."""
        self._loading = False
        await self._server.set_ready(True)

    async def stop(self) -> None:
        """Close the port, as a process that dies does."""
        self.crash()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def crash(self) -> None:
        """End the stream without a word and forget everything, as a process that died and came back."""
        self.incarnation_id = uuid.uuid4().hex
        self.weights, self.staged, self.asleep = weights_pb2.Weights(), None, frozenset()
        self.groups.clear()
        if self._end is not None and not self._end.done():
            self._end.set_exception(Unavailable("the fake worker crashed"))

    # -- control from tests

    def hold(self) -> None:
        """Answer nothing until ``release``: the way to look at a state that would pass too quickly, and a hang."""
        self._open.clear()

    def release(self, plans: int | None = None) -> None:
        """Answer ``plans`` more plans, or everything from now on."""
        self._permits = 0 if plans is None else self._permits + plans
        self._holds = False
        self._open.set()

    async def received(self, plans: int) -> None:
        """Wait until ``plans`` plans have arrived in all."""
        async with self._progress:
            await self._progress.wait_for(lambda: self._received >= plans)

    async def until_held(self) -> None:
        """Wait until a plan waits for ``release``: a pause cannot begin before that."""
        async with self._progress:
            await self._progress.wait_for(lambda: self._holds)

    # -- the contract

    async def GetWorkerInfo(self, request, context):
        self.asked += 1
        if self._loading:
            raise Unavailable("the model is still loading")
        info = self.shape.worker_info(self.incarnation_id)
        info.weights.CopyFrom(self.weights)
        info.asleep.extend(write_parts(self.asleep))
        return worker_pb2.GetWorkerInfoResponse(info=info)

    async def StageWeights(self, request, context):
        self.staged = None
        if (waiting := self.on_stage()) is not None:
            await asyncio.shield(waiting)
        self.check_arrived(request.update_id)
        if (content := self._content(request)) is None:
            raise InvalidRequest(f"{request.directory}: model.norm.weight is missing", field="directory")
        self.staged = request
        return worker_weights_pb2.StageWeightsResponse(tensors=1, bytes=100, fingerprint=content)

    async def CommitWeights(self, request, context):
        staged, self.staged = self.staged, None
        if staged is None or staged.update_id != request.update_id:
            raise FailedPrecondition("it is not staged")
        if (waiting := self.on_commit()) is not None:
            await waiting
        self.weights = weights_pb2.Weights(
            version=staged.version,
            directory=staged.directory or f"/uploads/{staged.update_id}",
            update_id=staged.update_id,
            committed_unix_ns=request.committed_unix_ns or time.time_ns(),
            fingerprint=self._content(staged),
            uploaded=not staged.directory,
        )
        self.model.weights = self.weights.fingerprint
        return worker_weights_pb2.CommitWeightsResponse(weights=self.weights)

    async def DiscardWeights(self, request, context):
        if self.staged is not None and self.staged.update_id == request.update_id:
            self.staged = None
        if (waiting := self.on_discard()) is not None:
            await waiting
        if request.remove_upload and request.update_id != self.weights.update_id:
            self.remove_uploads(lambda update_id: update_id == request.update_id)
        return worker_weights_pb2.DiscardWeightsResponse()

    async def GetWeights(self, request, context):
        response = worker_weights_pb2.GetWeightsResponse(weights=self.weights)
        if request.checksums:
            response.checksums.add(name="norm", blake2b=f"{self.weights.fingerprint:032x}")
        return response

    async def Sleep(self, request, context):
        check_level(request.level)
        if (waiting := self.on_sleep()) is not None:
            await waiting
        given = read_parts(request.parts) - self.asleep
        self.asleep |= given
        if MemoryPart.KV_CACHE in given:
            self.model.checker.kv[:] = 0
        return sleep_pb2.SleepResponse(released_bytes=1000 * len(given))

    async def Wake(self, request, context):
        if (waiting := self.on_wake()) is not None:
            await waiting
        self.asleep -= read_parts(request.parts)
        return sleep_pb2.WakeResponse()

    def _content(self, request: worker_weights_pb2.StageWeightsRequest) -> int | None:
        """Return the number of the weights to stage, or None. The number of an upload is its first byte."""
        if not (directory := request.directory):
            upload = self.uploads.get(request.update_id)
            return None if upload is None else upload.data[0]
        above, _, name = directory.rpartition("/")
        return self.disk.get(directory, int(name) if above == "/weights" and name.isdecimal() else None)

    async def RunSteps(self, request_iterator, context):
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("payload") != "hello":
            raise InvalidRequest("the first message must be a hello")
        hello = first.hello
        if hello.expected_incarnation_id != self.incarnation_id:
            raise FailedPrecondition(f"this is incarnation {self.incarnation_id}")
        if not 1 <= hello.plans_in_flight <= self.shape.max_plans_in_flight:
            raise InvalidRequest(f"plans_in_flight={hello.plans_in_flight}")
        if self.shape.tp_size * self.shape.pp_size > 1 and not hello.stream_id:
            raise InvalidRequest("a hello to one rank of several must have a stream_id")
        if self._end is not None and not self._end.done():
            self._end.set_exception(TokaError("a new hello ended this stream"))
        end = self._end = asyncio.get_running_loop().create_future()
        self.model = FakeModel(self.shape, self.script)
        self.model.weights = self.weights.fingerprint
        self.model.fail_tokens = self.fail_tokens
        self.remove_uploads(lambda update_id: update_id != self.weights.update_id)
        self.streams += 1
        self.stream_ids.append(hello.stream_id)
        self.at_rest.clear()
        plans = _Plans()
        reader = asyncio.create_task(self._read(request_iterator, plans, hello.plans_in_flight))
        try:
            yield worker_pb2.RunStepsResponse(
                ready=worker_pb2.Ready(incarnation_id=self.incarnation_id, takes_plans_together=self.takes_together)
            )
            together = self.takes_together and hello.takes_results_together
            while results := await self._next_results(plans, end, together):
                if len(results) == 1:
                    yield worker_pb2.RunStepsResponse(result=results[0])
                else:
                    yield worker_pb2.RunStepsResponse(results=worker_pb2.StepResults(results=results))
        except Violation as violation:
            self.violations.append(str(violation))
            raise InvalidRequest(str(violation)) from violation
        finally:
            reader.cancel()
            end.cancel()
            if end.done() and not end.cancelled():
                end.exception()
            if end is self._end:
                self.at_rest.set()

    async def _read(self, request_iterator, plans: _Plans, most: int) -> None:
        try:
            async for request in request_iterator:
                kind = request.WhichOneof("payload")
                if kind != "plan" and not (kind == "plans" and self.takes_together):
                    plans.put_nowait(Violation(f"{kind} after hello"))
                    continue
                arrived = [request.plan] if kind == "plan" else request.plans.plans
                self.largest_message = max(self.largest_message, len(arrived))
                if self.record:
                    self.plans.extend(arrived)
                for plan in arrived:
                    plans.put_nowait(plan)
                plans.unanswered += len(arrived)
                self.most_unanswered = max(self.most_unanswered, plans.unanswered)
                if plans.unanswered > most:
                    plans.put_nowait(Violation(f"{plans.unanswered} plans in flight, {most} were announced"))
                async with self._progress:
                    self._received += len(arrived)
                    self._progress.notify_all()
            self.farewells += 1
        finally:
            plans.put_nowait(None)

    async def _next_results(self, plans: _Plans, end: asyncio.Future, together: bool) -> list:
        """One; all that there are, if they may go ``together`` and nothing holds them. None at the end."""
        results = []
        while (result := await self._next_result(plans, end)) is not None:
            results.append(result)
            if not together or self.step_s or self._permits or plans.empty() or not self._open.is_set():
                return results
        plans.put_nowait(None)  # the end is behind these
        return results

    async def _next_result(self, plans: _Plans, end: asyncio.Future):
        plan = await _first(plans.get(), end)
        if plan is None:
            return None
        if isinstance(plan, Violation):
            raise plan
        while not self._open.is_set():  # it may be held again before this task runs
            async with self._progress:
                self._holds = True
                self._progress.notify_all()
            await _first(self._open.wait(), end)
        if self._permits:
            self._permits -= 1
            if not self._permits:
                self._open.clear()
        begun = time.perf_counter()
        if self.asleep:
            raise Violation(f"plan {plan.step} during a sleep", step=plan.step)
        result = self.model.apply(plan)
        if self.step_s:
            lasts_s = self.step_s + self.token_s * int(self.model.checker.last.batch.token_counts.sum())
            await asyncio.sleep(max(0.0, lasts_s - (time.perf_counter() - begun)))
        for prefill in self.traces.start_plan(plan, 0) if self.traces is not None else ():
            prefill.end(Timing())
        if self.poison is not None and self._is_poisoned(plan, result):
            self.deaths += 1
            self.end_of()
            await _first(asyncio.Event().wait(), end)
        if not self.shape.reports:
            result = plan_pb2.StepResult(step=result.step)
        result.queued_plans = plans.qsize()
        self.answered += 1
        plans.unanswered -= 1
        return result

    def _is_poisoned(self, plan: plan_pb2.StepPlan, result: plan_pb2.StepResult) -> bool:
        return self.poison in result.token_ids or any(self.poison in each.token_ids for each in plan.admissions)


class FakeReplica:
    """A ``FakeWorker`` for each rank."""

    def __init__(
        self, shape: FakeShape | None = None, *, tp_size: int = 1, pp_size: int = 1, kind: type[FakeWorker] = FakeWorker
    ) -> None:
        sizes = replace(shape or FakeShape(), tp_size=tp_size, pp_size=pp_size)
        ranks = [(tp_rank, pp_rank) for pp_rank in range(pp_size) for tp_rank in range(tp_size)]
        self.workers = [kind(replace(sizes, tp_rank=tp_rank, pp_rank=pp_rank)) for tp_rank, pp_rank in ranks]
        self.meet()

    def meet(self) -> None:
        """From now on all ranks are of one start."""
        incarnation_id = uuid.uuid4().hex
        for worker in self.workers:
            worker.incarnation_id = incarnation_id


async def _first(work, end: asyncio.Future):
    """``work``'s result, unless the stream is to end first."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
    if end.done():
        task.cancel()
        return end.result()
    return task.result()


async def _serve(arguments: list[str]) -> None:
    values = dict(argument.split("=", 1) for argument in arguments)
    known = {field.name for field in fields(FakeShape)}
    shape = FakeShape(**{name: int(value) for name, value in values.items() if name in known})
    reply = values.get("reply_ids")
    script = reply_script([int(token) for token in reply.split(",")]) if reply else None
    if parrot := values.get("parrot_ids"):
        script = parrot_script(*map(int, parrot.split(",")), shape.eos_token_id)
    own = ("listen", "reply_ids", "parrot_ids", "step_ms", "token_us", "poison", "otlp_endpoint")
    if unknown := set(values) - known - set(own):
        raise SystemExit(f"unknown: {sorted(unknown)}; known: {sorted(known)}, {', '.join(own)}")
    worker = FakeWorker(shape, script, float(values.get("step_ms", 0)) / 1000)
    worker.token_s = float(values.get("token_us", 0)) / 1e6
    if "poison" in values:
        worker.poison, worker.end_of = int(values["poison"]), lambda: os._exit(1)
    if "otlp_endpoint" in values:
        tracing = Tracing.of(WorkerConfig(otlp_endpoint=values["otlp_endpoint"]), "toka-worker")
        worker.traces = PrefillTraces(tracing)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(f"listening on {await worker.start(values.get('listen', '127.0.0.1:10410'))}", flush=True)
    await stop.wait()
    if worker.violations:
        print(f"violations: {worker.violations}", file=sys.stderr, flush=True)
    await worker.stop()


if __name__ == "__main__":
    grpc.aio.init_grpc_aio()
    asyncio.run(_serve(sys.argv[1:]))
