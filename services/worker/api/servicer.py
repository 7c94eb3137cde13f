"""The gRPC service: passes the plans of one stream at a time to the engine. Calls run on gRPC's threads."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import grpc
import structlog

from services.common.boundaries import errors_to, undo_on_error
from services.common.errors import Cancelled, FailedPrecondition, InvalidRequest, TokaError, Unavailable
from services.common.memory_parts import check_level, read_parts, write_parts
from services.common.packed import fill
from services.worker.api.broadcast import read_address, run_while_connected
from services.worker.api.shared_weights import read_shared
from services.worker.api.stream import Stream, Superseded
from services.worker.api.upload import read_chunks, read_header, read_tensors
from services.worker.engine.engine import Engine
from services.worker.engine.sleep import Sleeper
from services.worker.engine.weights import ModelWeights
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import broadcast_pb2, shared_weights_pb2, sleep_pb2, tensor_pb2, worker_pb2, worker_pb2_grpc
from tokasaurus.worker.v1 import weights_pb2 as worker_weights_pb2

log = structlog.get_logger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The servicer of WorkerService. Calls fail with UNAVAILABLE until ``info`` is set, when the engine has booted."""

    def __init__(self, engine: Engine) -> None:
        self.info: worker_pb2.WorkerInfo | None = None
        self.weights: ModelWeights | None = None  # set before ``info``; None if the worker cannot replace its weights
        self.sleeper: Sleeper | None = None  # set before ``info``; None if the worker cannot sleep
        self._engine = engine
        self._lock = threading.Lock()  # protects the following fields and the ``closed`` of every stream
        self._current: Stream | None = None
        self._draining = False
        self._closed = threading.Condition(self._lock)  # notified when no stream is open

    def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetWorkerInfoResponse:
        response = worker_pb2.GetWorkerInfoResponse(info=self._ready_info())
        if self.weights is not None:
            response.info.weights.CopyFrom(weights_pb2.Weights(**self.weights.settled_version()._asdict()))
        if self.sleeper is not None:
            response.info.sleeps = True
            response.info.asleep.extend(write_parts(self.sleeper.settled_parts()))
        return response

    def RunSteps(
        self, requests: Iterator[worker_pb2.RunStepsRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.RunStepsResponse]:
        """Run the plans of a stream. The calling thread sends results; another thread receives plans."""
        info = self._ready_info()
        stream = self._open(next(requests, None), info)
        try:
            # The callback runs when the client disconnects, which this thread cannot notice while it waits for results.
            if not context.add_callback(lambda: self._close(stream)):
                return
            if self.weights is not None:
                self.weights.remove_abandoned_uploads()
            ready = worker_pb2.Ready(incarnation_id=info.incarnation_id, takes_plans_together=True)
            yield worker_pb2.RunStepsResponse(ready=ready)
            threading.Thread(target=self._receive, args=(requests, stream), name="plans", daemon=True).start()
            while (message := stream.next_message()) is not None:
                yield message
        except Superseded as error:
            context.set_code(grpc.StatusCode.ABORTED)
            context.set_details(str(error))
        finally:
            self._close(stream)

    def StageWeights(
        self, request: worker_weights_pb2.StageWeightsRequest, context: grpc.ServicerContext
    ) -> worker_weights_pb2.StageWeightsResponse:
        weights = self._ready_weights()
        staged = weights.stage(request.update_id, request.version, request.directory)
        if not context.is_active():  # the caller has left, and nothing else would discard the update
            weights.discard(request.update_id)
        return worker_weights_pb2.StageWeightsResponse(
            tensors=len(staged.tensors), bytes=staged.nbytes, fingerprint=staged.fingerprint
        )

    def CommitWeights(
        self, request: worker_weights_pb2.CommitWeightsRequest, context: grpc.ServicerContext
    ) -> worker_weights_pb2.CommitWeightsResponse:
        weights, is_wanted = self._ready_weights(), self._make_check(context)
        version = weights.commit(request.update_id, request.committed_unix_ns, is_wanted)
        return worker_weights_pb2.CommitWeightsResponse(weights=weights_pb2.Weights(**version._asdict()))

    def DiscardWeights(
        self, request: worker_weights_pb2.DiscardWeightsRequest, context: grpc.ServicerContext
    ) -> worker_weights_pb2.DiscardWeightsResponse:
        self._ready_weights().discard(request.update_id, remove_upload=request.remove_upload)
        return worker_weights_pb2.DiscardWeightsResponse()

    def GetWeights(
        self, request: worker_weights_pb2.GetWeightsRequest, context: grpc.ServicerContext
    ) -> worker_weights_pb2.GetWeightsResponse:
        weights = self._ready_weights()
        version, checksums = weights.checksums() if request.checksums else (weights.version, [])
        response = worker_weights_pb2.GetWeightsResponse(weights=weights_pb2.Weights(**version._asdict()))
        for name, checksum in checksums:
            response.checksums.add(name=name, blake2b=checksum)
        return response

    def ReadTensor(
        self, request: tensor_pb2.ReadTensorRequest, context: grpc.ServicerContext
    ) -> tensor_pb2.ReadTensorResponse:
        found = self._ready_weights().read_rows(request.name, request.rows)
        response = tensor_pb2.ReadTensorResponse(shape=found.shape)
        if found.values is not None:
            fill(response, "values", found.values.numpy().reshape(-1))
        return response

    def PrepareUpload(
        self, request: worker_weights_pb2.PrepareUploadRequest, context: grpc.ServicerContext
    ) -> worker_weights_pb2.PrepareUploadResponse:
        needed = self._ready_weights().uploads.prepare(request.update_id)
        return worker_weights_pb2.PrepareUploadResponse(needed=needed)

    def UploadWeights(
        self, requests: Iterator[worker_weights_pb2.UploadWeightsRequest], context: grpc.ServicerContext
    ) -> worker_weights_pb2.UploadWeightsResponse:
        weights = self._ready_weights()
        header = read_header(next(requests, None))
        try:
            with undo_on_error(weights.uploads.remove, header.update_id):
                weights.receive(header.update_id, read_tensors(header.tensors), read_chunks(requests))
                if not context.is_active():
                    raise Cancelled("the caller has disconnected")
        except TokaError:
            for _ in requests:  # an asyncio client that still sends would lose the error (grpc/grpc#36066)
                pass
            raise
        return worker_weights_pb2.UploadWeightsResponse()

    def Sleep(self, request: sleep_pb2.SleepRequest, context: grpc.ServicerContext) -> sleep_pb2.SleepResponse:
        check_level(request.level)
        sleeper, is_wanted = self._ready_sleeper(), self._make_check(context)
        released = sleeper.sleep(read_parts(request.parts), request.level, is_wanted)
        return sleep_pb2.SleepResponse(released_bytes=released)

    def Wake(self, request: sleep_pb2.WakeRequest, context: grpc.ServicerContext) -> sleep_pb2.WakeResponse:
        self._ready_sleeper().wake(read_parts(request.parts), self._make_check(context))
        return sleep_pb2.WakeResponse()

    def JoinUpdateGroup(
        self, request: broadcast_pb2.JoinUpdateGroupRequest, context: grpc.ServicerContext
    ) -> broadcast_pb2.JoinUpdateGroupResponse:
        weights = self._ready_weights()
        broadcasts = weights.broadcasts
        address = read_address(request.group, weights.rank_index, weights.device)
        run_while_connected(
            context,
            lambda: broadcasts.join(address),
            lambda group: None if group is None else broadcasts.abandon(group),
        )
        return broadcast_pb2.JoinUpdateGroupResponse()

    def LeaveUpdateGroup(
        self, request: broadcast_pb2.LeaveUpdateGroupRequest, context: grpc.ServicerContext
    ) -> broadcast_pb2.LeaveUpdateGroupResponse:
        return broadcast_pb2.LeaveUpdateGroupResponse(left=self._ready_weights().broadcasts.leave(request.name))

    def ReceiveWeights(
        self, request: broadcast_pb2.ReceiveWeightsRequest, context: grpc.ServicerContext
    ) -> broadcast_pb2.ReceiveWeightsResponse:
        broadcasts = self._ready_weights().broadcasts
        group = broadcasts.find(request.group)
        with undo_on_error(broadcasts.abandon, group):
            tensors = read_tensors(request.tensors, "tensors")
            missing = run_while_connected(
                context,
                lambda: broadcasts.receive(request.update_id, group, tensors, flat=request.flat),
                lambda _: broadcasts.abandon(group),
            )
        return broadcast_pb2.ReceiveWeightsResponse(missing=len(missing), first_missing=missing[0] if missing else "")

    def CopySharedWeights(
        self, request: shared_weights_pb2.CopySharedWeightsRequest, context: grpc.ServicerContext
    ) -> shared_weights_pb2.CopySharedWeightsResponse:
        shared = self._ready_weights().shared
        missing = shared.copy(request.update_id, read_shared(request), context.is_active)
        return shared_weights_pb2.CopySharedWeightsResponse(
            missing=len(missing), first_missing=missing[0] if missing else ""
        )

    def fail(self, error: TokaError) -> None:
        """End the open stream with ``error``, because the engine will send no more results."""
        with self._lock:
            if self._current is not None:
                self._current.fail(error)

    def drain(self, timeout_s: float) -> None:
        """Refuse further streams and plans, and wait until the open stream has its results and ends, or the timeout."""
        with self._lock:
            self._draining = True
            if self._current is not None:
                self._engine.finish(self._current)
            self._closed.wait_for(lambda: self._current is None, timeout_s)

    def _ready_info(self) -> worker_pb2.WorkerInfo:
        self._refuse_when_draining()
        if self.info is None:
            raise Unavailable("the model is still loading")
        return self.info

    def _ready_weights(self) -> ModelWeights:
        self._ready_info()
        if self.weights is None:
            raise FailedPrecondition("this worker cannot replace its weights")
        return self.weights

    def _ready_sleeper(self) -> Sleeper:
        self._ready_info()
        if self.sleeper is None:
            raise FailedPrecondition("a worker whose model runs through transformers cannot sleep")
        return self.sleeper

    def _make_check(self, context: grpc.ServicerContext) -> Callable[[], bool]:
        """Return a function that returns whether a call is still wanted. Any thread may call it.

        A call may wait behind another one. It is not wanted when its caller has disconnected, or when another stream of
        plans was opened. Otherwise it would run between plans of a scheduler that does not expect it, and on each rank
        between other plans.
        """
        stream = self._current
        return lambda: context.is_active() and self._current in (stream, None)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("the worker is going away", reason="DRAINING")

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
        if not hello.stream_id and info.tensor_parallel.size * info.pipeline_parallel.size > 1:
            raise InvalidRequest(
                "stream_id is empty: a replica of several ranks needs one, the same to all and new for each connection",
                field="hello.stream_id",
            )
        stream = Stream(hello)
        with self._lock:
            self._refuse_when_draining()
            if self._current is not None:
                self._current.closed = True
                self._current.fail(Superseded(f"scheduler {stream.scheduler_id!r} has taken this worker over"))
            self._current = stream
            self._engine.open(stream)
        log.info("scheduler connected", scheduler=stream.scheduler_id, plans_in_flight=stream.plans_in_flight)
        return stream

    def _receive(self, requests: Iterator[worker_pb2.RunStepsRequest], stream: Stream) -> None:
        with errors_to(stream.fail), contextlib.suppress(grpc.RpcError):  # the client is gone: the stream is closed
            for request in requests:
                if stream.closed:
                    return
                for plan in stream.plans_of(request):
                    self._engine.submit(stream, plan)
            self._engine.finish(stream)

    def _close(self, stream: Stream) -> None:
        """Close ``stream``. Any thread may call it, several times."""
        with self._lock:
            if not stream.closed:
                stream.closed = True
                self._engine.close(stream)
            was_current = self._current is stream
            if was_current:
                self._current = None
                self._closed.notify_all()
        stream.finish()  # wakes the sending thread, if it still waits for results
        if was_current:
            log.info("scheduler disconnected", scheduler=stream.scheduler_id)
