"""A scheduler and fake workers over real gRPC, and a client that reads what a gateway would."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import SchedulerConfig
from services.scheduler.server import SchedulerServer
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeReplica, FakeWorker
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2, scheduler_pb2_grpc, session_pb2

T = TypeVar("T")
PROMPT = [40 + index % 500 for index in range(43)]


class Service:
    """All servers, a channel and a stub. ``worker`` is the rank that reports."""

    def __init__(self, workers: Sequence[FakeWorker], server: SchedulerServer, channel: grpc.aio.Channel) -> None:
        self.workers = workers
        self.worker = next((worker for worker in workers if worker.shape.reports), None)
        self.server = server
        self.channel = channel
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

    async def until_health(self, serving: bool) -> None:
        call = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest())
        try:
            async for answer in call:
                if (answer.status == health_pb2.HealthCheckResponse.SERVING) == serving:
                    return
        finally:
            call.cancel()

    async def load(self) -> observe_pb2.Load:
        return (await self.stub.GetLoad(observe_pb2.GetLoadRequest())).load

    async def until_load(self, condition) -> observe_pb2.Load:
        """Wait, on a session's pushed loads, until one satisfies ``condition``."""
        async with session(self) as client:
            while not condition(load := await self.load()):
                await client.until(lambda message: message.HasField("load") or message.HasField("heartbeat"))
                await client.send(heartbeat=session_pb2.Heartbeat(nonce=1))
            return load

    async def begin(self, client: "Client", **fields) -> None:
        """Submit a request as handle 0, and read its first tokens. Workers answer five plans and hold the next one."""
        for worker in self.workers:
            worker.hold()
        await client.submit(0, **fields)
        await self.answer_five()
        await client.until(lambda message: message.HasField("outputs"))

    async def answer_five(self) -> None:
        """Let each worker answer five plans, and wait until it holds the next one."""
        for worker in self.workers:
            worker.release(5)
        for worker in self.workers:
            await worker.until_held()

    def release(self) -> None:
        for worker in self.workers:
            worker.release()

    async def pausing(self, call: Awaitable[T]) -> T:
        """Return the result of ``call``. Release the workers when ``call`` has requested a pause, not earlier.

        A worker must hold a plan, so that the pause does not begin, and end, before it is seen.
        """
        calling = asyncio.ensure_future(call)
        await self.until_load(lambda load: load.paused)
        self.release()
        return await calling

    async def generate(self, **fields) -> dict[int, "Sample"]:
        """Read a Generate call to its end: samples by index."""
        samples: dict[int, Sample] = defaultdict(Sample)
        call = self.stub.Generate(generate_pb2.GenerateRequest(**fields))
        async for response in call:
            for output in response.outputs.samples:
                samples[output.sample_index].add(output)
        return samples


class Sample:
    """One sample's news put together."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.chosen: list[float] = []
        self.top_counts: list[int] = []
        self.top_ids: list[int] = []
        self.experts: list[tuple[int, bytes]] = []  # (position of the first token, experts)
        self.finish: generate_pb2.Finish | None = None

    def add(self, output: generate_pb2.SampleOutput) -> None:
        assert self.finish is None
        self.tokens += output.token_ids
        self.text += output.text
        self.chosen += output.logprobs.chosen
        self.top_counts += output.logprobs.top_counts
        self.top_ids += output.logprobs.top_token_ids
        self.experts += [(piece.start, piece.experts) for piece in output.routed_experts]
        if output.HasField("finish"):
            self.finish = output.finish


class Client:
    """One Session."""

    def __init__(self, call) -> None:
        self.call = call
        self.samples: dict[int, Sample] = defaultdict(Sample)
        self.accepted: dict[int, generate_pb2.Accepted] = {}
        self.rejected: dict[int, object] = {}
        self.loads: list[observe_pb2.Load] = []
        self.opened: session_pb2.SessionOpened | None = None

    async def send(self, **payload) -> None:
        await self.call.write(session_pb2.SessionRequest(**payload))

    async def submit(self, handle: int, **fields) -> None:
        request = generate_pb2.GenerateRequest(**fields)
        await self.send(submit=session_pb2.Submit(handle=handle, request=request))

    async def read(self) -> session_pb2.SessionResponse | None:
        """The next message, taken in; None at the end of the stream."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return None
        match message.WhichOneof("payload"):
            case "opened":
                self.opened = message.opened
            case "acceptance":
                self.accepted[message.acceptance.handle] = message.acceptance.accepted
            case "acceptances":
                self.accepted |= {each.handle: each.accepted for each in message.acceptances.acceptances}
            case "rejection":
                self.rejected[message.rejection.handle] = message.rejection.status
            case "load":
                self.loads.append(message.load)
            case "outputs":
                self._take(message.outputs)
        return message

    def _take(self, outputs: session_pb2.StepOutputs) -> None:
        counts = list(outputs.token_counts) or [1] * len(outputs.handles)
        assert len(counts) == len(outputs.handles)
        assert len(set(outputs.handles)) == len(outputs.handles)
        assert sum(counts) == len(outputs.token_ids)
        at = 0
        for handle, count in zip(outputs.handles, counts, strict=True):
            assert handle in self.accepted or any(first <= handle for first in self.accepted), (
                "a token before the acceptance"
            )
            assert self.samples[handle].finish is None
            self.samples[handle].tokens += outputs.token_ids[at : at + count]
            self.samples[handle].chosen += outputs.logprobs.chosen[at : at + count]
            at += count
        for step in outputs.routed_experts:
            width, begin = len(step.experts) // sum(step.token_counts), 0
            for handle, start, count in zip(step.handles, step.starts, step.token_counts, strict=True):
                end = begin + width * count
                assert self.samples[handle].finish is None
                self.samples[handle].experts.append((start, step.experts[begin:end]))
                begin = end
        for finished in outputs.finished:
            assert self.samples[finished.handle].finish is None
            self.samples[finished.handle].finish = finished.finish

    async def until(self, condition) -> session_pb2.SessionResponse:
        while (message := await self.read()) is not None:
            if condition(message):
                return message
        raise AssertionError(f"the stream ended: {await self.call.code()} {await self.call.details()}")

    async def finished(self, *handles: int) -> None:
        """Read until all these samples have their Finish."""
        while any(self.samples[handle].finish is None for handle in handles):
            assert await self.read() is not None, await self.call.details()

    async def decided(self, handle: int) -> None:
        while handle not in self.accepted and handle not in self.rejected:
            assert await self.read() is not None, await self.call.details()


@asynccontextmanager
async def session(service: Service):
    call = service.stub.Session()
    client = Client(call)
    try:
        await client.send(open=session_pb2.SessionOpen(client_id="test"))
        await client.read()
        yield client
    finally:
        call.cancel()


@asynccontextmanager
async def start(
    shape: FakeShape | None = None, *, worker: FakeWorker | None = None, replica: FakeReplica | None = None, **flags
):
    """All servers, ready. At the end: no contract broken, nothing left behind."""
    workers = replica.workers if replica else [worker or FakeWorker(shape)]
    addresses = [await each.start() for each in workers]
    try:
        async with with_scheduler(addresses, workers, **flags) as service:
            yield service
            assert [each.violations for each in workers] == [[]] * len(workers)
    finally:
        for each in workers:
            await each.stop()


@asynccontextmanager
async def with_scheduler(addresses: Sequence[str], workers: Sequence[FakeWorker] = (), **flags):
    """A scheduler, ready, of workers that run already. At the end: nothing left behind."""
    server = SchedulerServer(
        SchedulerConfig(worker_addresses=tuple(addresses), scheduler_listen="127.0.0.1:0", **flags)
    )
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        service = Service(workers, server, channel)
        await service.until_health(True)
        try:
            yield service
            await nothing_left(service)
        finally:
            await server.stop()


async def nothing_left(service: Service) -> None:
    """Pages, slots and queue are empty once every stream is closed."""
    load = await service.load()
    while load.running_sequences or load.waiting_sequences or load.parked_sequences:
        await asyncio.sleep(0)
        load = await service.load()
    assert load.in_use_pages == 0
    assert load.free_pages + load.cached_pages == load.total_pages


async def status_of(call) -> grpc.aio.AioRpcError:
    """The error that ``call`` ends with."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
