"""WorkerService over gRPC: one stream of plans at a time, handed to the engine. It runs on the asyncio thread."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from services.common.errors import FailedPrecondition, InvalidRequest, TokaError, Unavailable
from services.worker.api.stream import Stream, Superseded
from services.worker.engine import Engine
from tokasaurus.worker.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers UNAVAILABLE until ``info`` is set, which says that the engine has booted."""

    def __init__(self, engine: Engine) -> None:
        self.info: worker_pb2.WorkerInfo | None = None
        self._engine = engine
        self._current: Stream | None = None

    async def GetWorkerInfo(self, request, context) -> worker_pb2.GetWorkerInfoResponse:
        return worker_pb2.GetWorkerInfoResponse(info=self._ready_info())

    async def RunSteps(
        self, requests: AsyncIterator[worker_pb2.RunStepsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RunStepsResponse]:
        info = self._ready_info()
        stream = self._open(await anext(aiter(requests), None), info)
        # Also called when the client goes away while an answer is being sent, where `finally` would have to wait.
        context.add_done_callback(lambda _: self._close(stream))
        receiver = asyncio.create_task(self._receive(requests, stream))
        try:
            yield worker_pb2.RunStepsResponse(ready=worker_pb2.Ready(incarnation_id=info.incarnation_id))
            while (result := await stream.next_answer()) is not None:
                yield worker_pb2.RunStepsResponse(result=result)
        except Superseded as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            receiver.cancel()
            self._close(stream)

    def _ready_info(self) -> worker_pb2.WorkerInfo:
        if self.info is None:
            raise Unavailable("the model is still loading")
        return self.info

    def _open(self, first: worker_pb2.RunStepsRequest | None, info: worker_pb2.WorkerInfo) -> Stream:
        if first is None or not first.HasField("hello"):
            raise InvalidRequest("the first message of RunSteps must be a hello", field="hello")
        hello = first.hello
        if hello.expected_incarnation_id != info.incarnation_id:
            raise FailedPrecondition(
                f"expected_incarnation_id={hello.expected_incarnation_id!r}, but this is {info.incarnation_id!r}:"
                " the worker has restarted; call GetWorkerInfo again",
                reason="INCARNATION_MISMATCH",
            )
        if not 1 <= hello.plans_in_flight <= info.max_plans_in_flight:
            raise InvalidRequest(
                f"plans_in_flight={hello.plans_in_flight}: expected 1 to {info.max_plans_in_flight}",
                field="hello.plans_in_flight",
            )
        stream = Stream(hello.plans_in_flight, hello.scheduler_id)
        if self._current is not None:
            self._current.closed = True
            self._current.end(Superseded(f"scheduler {stream.scheduler_id!r} has taken this worker over"))
        self._current = stream
        self._engine.open(stream)
        log.info("scheduler connected", scheduler=stream.scheduler_id, plans_in_flight=stream.plans_in_flight)
        return stream

    async def _receive(self, requests: AsyncIterator[worker_pb2.RunStepsRequest], stream: Stream) -> None:
        try:
            async for request in requests:
                if stream.closed:
                    return
                if not request.HasField("plan"):
                    raise InvalidRequest("after the hello every message must be a plan", field="plan")
                stream.unanswered += 1
                if stream.unanswered > stream.plans_in_flight:
                    raise InvalidRequest(
                        f"more plans unanswered than the hello's plans_in_flight={stream.plans_in_flight}",
                        field="plan",
                    )
                self._engine.submit(stream, request.plan)
        except TokaError as error:
            stream.end(error)
        else:
            self._engine.finish(stream)

    def _close(self, stream: Stream) -> None:
        if not stream.closed:
            stream.closed = True
            self._engine.close(stream)
        if self._current is stream:
            self._current = None
            log.info("scheduler gone", scheduler=stream.scheduler_id)
