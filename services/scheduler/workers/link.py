"""Connects to the workers of a replica, runs their step streams, and reconnects when a stream is lost."""

import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.boundaries import errors_to
from services.common.errors import TokaError
from services.common.plan.codec import decode_result
from services.common.rpc.channel import PLAIN, Dialer
from services.scheduler.workers import heartbeat
from services.scheduler.workers.heartbeat import WorkerHeartbeat
from services.scheduler.workers.replica import Unready, is_reporter, merge_infos
from services.scheduler.workers.sleep import Sleep, settle
from services.scheduler.workers.stream import RankStream, ReceivedResult, WorkerEvents, WorkerStream
from services.scheduler.workers.weights import WorkerWeights, restore
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_INFO_TIMEOUT_S = 10.0
_HEALTH_TIMEOUT_S = 10.0  # of one Watch; repeated while the worker reports that it is not ready
_BOOT_S = 60.0  # a worker that starts with the scheduler listens by then; later its absence is logged as a warning
_READY_TIMEOUT_S = 30.0  # from the hello to ready
_STOP_TIMEOUT_S = 2.0  # for sent plans to reach the workers

_Call = TypeVar("_Call", bound=grpc.RpcContext)


class WorkerLink:
    """Link to the workers. It has a thread, and another one for the results of each rank.

    The blocking API does not take time of an event loop.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        scheduler_id: str,
        plans_in_flight: int,
        events: WorkerEvents,
        check: Callable[[worker_pb2.WorkerInfo], None],
        on_unusable: Callable[[str], object],
        dialer: Dialer = PLAIN,
    ) -> None:
        """Create a link without starting it. ``plans_in_flight`` is the limit, which the workers may reduce.

        ``check`` gets the result of ``merge_infos``, and raises ``ValueError`` for workers that this scheduler cannot
        use. If these are the first workers, ``on_unusable`` is called with the reason, because their flags do not fit
        together and waiting would not help. It is also called if the link's thread fails. Both are called on the link's
        thread.
        """
        self._addresses = addresses
        self._scheduler_id = scheduler_id
        self._plans_in_flight = plans_in_flight
        self._events = events
        self._check = check
        self._on_unusable = on_unusable
        self._dialer = dialer
        self._served = False  # workers have been connected
        self._last_reason = ""  # why there is no worker, as last reported
        self._started_at = 0.0
        self._stopping = threading.Event()
        self._calls: list[grpc.RpcContext] = []  # calls in which threads block
        self._weights: WorkerWeights | None = None  # of the last connection
        self.stream: WorkerStream | None = None  # the current one
        self.committed = weights_pb2.Weights()  # the last known weights of the workers
        self.sleep: Sleep | None = None  # of all workers; None before the first connection
        self._thread = threading.Thread(target=self._run, name="worker-link", daemon=True)

    def start(self) -> None:
        self._started_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the streams, after the sent plans if they are up, and the threads."""
        self._stopping.set()
        if (stream := self.stream) is not None:
            stream.finish()
            self._thread.join(_STOP_TIMEOUT_S)
        if (weights := self._weights) is not None:
            weights.close()
        for call in self._calls:
            call.cancel()  # closing channels during calls would not be safe
        self._thread.join()

    def _registered(self, call: _Call) -> _Call:
        """Register ``call`` so that ``stop`` cancels it, and return it.

        ``stop`` sets its flag before it reads the calls.
        """
        self._calls.append(call)
        if self._stopping.is_set():
            call.cancel()
        return call

    def _run(self) -> None:
        with errors_to(self._fail):
            self._connect_forever()

    def _fail(self, error: Exception) -> None:
        """End the scheduler, since the link does not reconnect: for example, there is no memory or thread left."""
        if not self._stopping.is_set():
            log.error("the link to the worker failed", exc_info=error)
            self._on_unusable(f"the link to the worker failed: {error!r}")

    def _connect_forever(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            reason, was_up = self._connect_once()
            if was_up:
                backoff = _FIRST_BACKOFF_S
            self._report(reason, was_up=was_up)
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF_S)

    def _report(self, reason: str, *, was_up: bool = False) -> None:
        """Log why there is no worker, and report it, unless the reason is unchanged.

        It is not a warning while the workers may still be starting.
        """
        if self._stopping.is_set():
            return
        starting = not self._served and time.monotonic() < self._started_at + _BOOT_S
        if reason != self._last_reason:
            (log.info if starting else log.warning)("no worker", reason=reason)
            if not was_up:
                self._events.worker_missing(reason)
        self._last_reason = "" if was_up else reason

    def _connect_once(self) -> tuple[str, bool]:
        """Run one connection to its end. Return the reason of its end, and whether plans could be sent on it."""
        self._calls = []
        with ExitStack() as channels:
            opened = {address: channels.enter_context(self._dialer.open(address)) for address in self._addresses}
            stubs = {address: worker_pb2_grpc.WorkerServiceStub(channel) for address, channel in opened.items()}
            try:
                for address, channel in opened.items():
                    self._await_health(address, channel)
                infos = self._get_infos(stubs)
                info = merge_infos(infos)
                self._check(info)
                plans = min(self._plans_in_flight, info.max_plans_in_flight)
                ranks = [RankStream(address, reports=is_reporter(each)) for address, each in infos.items()]
                weights = self._weights = WorkerWeights(stubs)
                channels.callback(weights.close)
                if self._stopping.is_set():
                    weights.close()
                self.committed = restore(weights, infos, self.committed)
                self.sleep = settle(weights, infos, self.sleep)
                version = self.committed.version
                stream = WorkerStream(info, plans, ranks, self._events, weights, version, self._is_asleep)
                heartbeats = [WorkerHeartbeat(address, channel, self._dialer) for address, channel in opened.items()]
                reason = self._run_streams(stream, stubs, _Reports(heartbeats))
            except Unready as error:
                reason = str(error)
            except TokaError as error:  # the weights cannot be restored, or a worker cannot be put to sleep
                reason = error.message
            except grpc.FutureCancelledError:
                reason = "stopping"
            except ValueError as error:  # workers that cannot be used
                reason = str(error)
                if not self._served:
                    self._on_unusable(reason)
        lost, self.stream = self.stream, None
        if lost is not None:
            stopping = self._stopping.is_set()
            self._events.worker_lost(lost, "the scheduler stops" if stopping else reason, stopping=stopping)
        return reason, lost is not None

    def _is_asleep(self) -> bool:
        return self.sleep is not None and bool(self.sleep.parts)

    def _await_health(self, address: str, channel: grpc.Channel) -> None:
        """Block until the worker reports SERVING. Return at once for a worker without health watches.

        Raises ``Unready`` if there is no connection to it.
        """
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stub lacks the methods
        while not self._stopping.is_set():
            responded = False
            request = health_pb2.HealthCheckRequest()
            watch = self._registered(stub.Watch(request, timeout=_HEALTH_TIMEOUT_S, wait_for_ready=True))
            try:
                for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    responded = True
                    self._report(f"worker {address} is not ready yet: it may still be loading its model")
            except grpc.RpcError as error:
                if error.code() not in heartbeat.NO_CONNECTION:
                    return
                if not (responded and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise Unready(_named(address, error)) from error
            finally:
                watch.cancel()
        raise Unready("stopping")

    def _get_infos(self, stubs: dict[str, worker_pb2_grpc.WorkerServiceStub]) -> dict[str, worker_pb2.WorkerInfo]:
        """Return the info of each worker."""
        request, infos = worker_pb2.GetWorkerInfoRequest(), {}
        calls = [
            self._registered(stub.GetWorkerInfo.future(request, timeout=_INFO_TIMEOUT_S, wait_for_ready=True))
            for stub in stubs.values()
        ]
        try:
            for address, call in zip(stubs, calls, strict=True):
                infos[address] = call.result().info
        except grpc.RpcError as error:
            raise Unready(_named(address, error)) from error
        finally:
            for call in calls:
                call.cancel()
        return infos

    def _run_streams(
        self, stream: WorkerStream, stubs: dict[str, worker_pb2_grpc.WorkerServiceStub], reports: "_Reports"
    ) -> str:
        """Send the same hello to all ranks, and receive their results until a stream ends. Then end the others.

        Return why the first stream ended.
        """
        hello = worker_pb2.Hello(
            scheduler_id=self._scheduler_id,
            expected_incarnation_id=stream.info.incarnation_id,
            plans_in_flight=stream.plans_in_flight,
            takes_results_together=True,
            stream_id=uuid.uuid4().hex,
        )
        readers = []
        try:
            for rank in stream.ranks:
                rank.call = call = self._registered(stubs[rank.address].RunSteps(rank.messages(hello)))
                reader = threading.Thread(
                    target=self._read, args=(stream, rank, call, reports), name="worker-answers", daemon=True
                )
                reader.start()
                readers.append(reader)
            return self._until_ready(stream, reports) or self._serve(stream, reports)
        finally:
            if not self._stopping.is_set():  # else ``stop`` ends them
                stream.end()
            for reader in readers:
                reader.join()
            reports.stop()
            stream.finish()  # ends gRPC's threads, which wait for plans

    def _until_ready(self, stream: WorkerStream, reports: "_Reports") -> str:
        """Wait until every rank is ready. Return an empty string, or the reason why a rank will not be."""
        waiting = {rank.address for rank in stream.ranks}
        until = time.monotonic() + _READY_TIMEOUT_S
        while waiting:
            try:
                rank, ended = reports.get(until)
            except TimeoutError:
                return f"worker {', '.join(sorted(waiting))}: no response to the hello within {_READY_TIMEOUT_S:g} s"
            if ended is not None:
                return _reason(ended)
            if rank is not None:
                waiting.discard(rank.address)
        return ""

    def _serve(self, stream: WorkerStream, reports: "_Reports") -> str:
        """Block until a stream ends. Return the reason."""
        self.stream, self._served, self._last_reason = stream, True, ""
        log.info("worker connected", addresses=",".join(self._addresses), incarnation=stream.info.incarnation_id)
        self._events.worker_connected(stream)
        while (ended := reports.get()[1]) is None:  # ignore a repeated ready
            pass
        return _reason(ended)

    def _read(
        self, stream: WorkerStream, rank: RankStream, call: Iterable[worker_pb2.RunStepsResponse], reports: "_Reports"
    ) -> None:
        """Report why ``call`` ended after its results. Runs on the rank's thread."""
        with errors_to(lambda error: reports.put((rank, error))):
            reports.put((rank, self._read_results(stream, rank, call, reports)))

    def _read_results(
        self, stream: WorkerStream, rank: RankStream, call: Iterable[worker_pb2.RunStepsResponse], reports: "_Reports"
    ) -> str:
        """Read the results of one rank from ``call`` to its end. Return the reason of the end."""
        try:
            last_s = time.monotonic()
            for response in call:
                kind = response.WhichOneof("payload")
                if kind == "ready":
                    rank.takes_together = response.ready.takes_plans_together
                    reports.put((rank, None))
                    continue
                results = [response.result] if kind == "result" else response.results.results
                before_s, now_s = last_s, time.monotonic()
                for index, result in enumerate(results, 1):
                    # Assume that results in one message were computed evenly since the last message.
                    ended_s = before_s + (now_s - before_s) * index / len(results)
                    stream.result_received(
                        rank, ReceivedResult(decode_result(result), result, ended_s) if rank.reports else None
                    )
                last_s = now_s
        except grpc.RpcError as error:
            ended = _named(rank.address, error)
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                log.error("the worker refused a plan", reason=ended)
            return ended
        except ValueError as error:  # malformed arrays; a new connection may help
            return f"worker {rank.address}: a result cannot be decoded: {error}"
        return f"worker {rank.address} ended the stream"


class _Reports:
    """Queue of reports from the ranks' threads: a rank is ready (None), or the reason why its stream ended."""

    def __init__(self, heartbeats: Sequence[WorkerHeartbeat]) -> None:
        self._queue: queue.SimpleQueue[tuple[RankStream | None, str | Exception | None]] = queue.SimpleQueue()
        self._heartbeats = heartbeats

    def put(self, report: tuple[RankStream, str | Exception | None]) -> None:
        self._queue.put(report)

    def get(self, until_s: float = math.inf) -> tuple[RankStream | None, str | Exception | None]:
        """Return the next report, or the reason of a heartbeat that closes its connection (without a rank).

        Raises ``TimeoutError`` at ``until_s``, a monotonic time.
        """
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                return self._queue.get(timeout=min(left_s, heartbeat.INTERVAL_S))
            except queue.Empty:
                if reason := next(filter(None, [each.check() for each in self._heartbeats]), ""):
                    return None, reason
        raise TimeoutError

    def stop(self) -> None:
        for each in self._heartbeats:
            each.stop()


def _reason(ended: str | Exception) -> str:
    if isinstance(ended, Exception):
        raise ended
    return ended


def _named(address: str, error: grpc.RpcError) -> str:
    return f"worker {address}: {error.code().name}: {error.details()}"
