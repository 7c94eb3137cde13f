"""The step streams to the workers of a replica: connect as soon as the workers are ready, send the hello, carry plans
and results, and connect again when a stream is lost."""

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

from services.common.plan.codec import decode_result
from services.common.rpc.channel import PLAIN, Dialer
from services.scheduler.workers import heartbeat
from services.scheduler.workers.heartbeat import Heartbeat
from services.scheduler.workers.replica import Unready, as_one, reports
from services.scheduler.workers.stream import Answer, RankStream, WorkerEvents, WorkerStream
from tokasaurus.worker.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_INFO_TIMEOUT_S = 10.0
_HEALTH_TIMEOUT_S = 10.0  # of one Watch; a new one begins while the worker answers that it is not ready
_BOOT_S = 60.0  # a worker that starts with the scheduler listens by then; later its absence is a warning
_READY_TIMEOUT_S = 30.0  # a hello that is not answered for so long never will be
_FAREWELL_S = 2.0  # plans that were sent have reached the workers by then

_NO_CONNECTION = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

_Call = TypeVar("_Call", bound=grpc.RpcContext)


class WorkerLink:
    """Runs on a thread of its own, and one for the answers of each rank: the blocking API costs no event loop and
    disturbs none."""

    def __init__(
        self,
        addresses: Sequence[str],
        scheduler_id: str,
        plans_in_flight: int,
        events: WorkerEvents,
        check: Callable[[worker_pb2.WorkerInfo], None],
        useless: Callable[[str], object],
        dialer: Dialer = PLAIN,
    ) -> None:
        """``plans_in_flight``: the most there will ever be, if the workers take them.

        ``check`` is given what ``as_one`` makes of the workers, and as that does it raises ``ValueError`` for workers
        that this scheduler cannot use. When those are the first there ever were, ``useless`` is told the reason, from
        the link's thread: all were started with flags that do not go together, and waiting would not help. So it is
        when the thread itself cannot go on.
        """
        self._addresses = addresses
        self._scheduler_id = scheduler_id
        self._plans_in_flight = plans_in_flight
        self._events = events
        self._check = check
        self._useless = useless
        self._dialer = dialer
        self._served = False  # some workers were connected
        self._said = ""  # why there is no worker, as reported last
        self._started_at = 0.0
        self._stopping = threading.Event()
        self._calls: list[grpc.RpcContext] = []  # what the threads wait for
        self._stream: WorkerStream | None = None  # the one that is up
        self._thread = threading.Thread(target=self._run, name="worker-link", daemon=True)

    def start(self) -> None:
        self._started_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the streams, well if they are up, and the threads."""
        self._stopping.set()
        if (stream := self._stream) is not None:
            stream.finish()
            self._thread.join(_FAREWELL_S)
        for call in self._calls:
            call.cancel()  # closing the channels under running calls, from here, would not be safe
        self._thread.join()

    def _waiting_for(self, call: _Call) -> _Call:
        """``call``, which ``stop`` will cancel: it sets the flag first and looks for calls then."""
        self._calls.append(call)
        if self._stopping.is_set():
            call.cancel()
        return call

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            try:
                reason, was_up = self._connect_once()
            except Exception as error:  # such as no memory, or no more threads: nobody would connect again
                if self._stopping.is_set():
                    return
                log.error("the link to the worker failed", exc_info=error)
                self._useless(f"the link to the worker failed: {error!r}")
                return
            if was_up:
                backoff = _FIRST_BACKOFF_S
            self._report(reason, was_up=was_up)
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF_S)

    def _report(self, reason: str, *, was_up: bool = False) -> None:
        """Log why there is no worker, and pass it on, unless that was done already. Not a warning while the workers may
        still be starting."""
        if self._stopping.is_set():
            return
        starting = not self._served and time.monotonic() < self._started_at + _BOOT_S
        if reason != self._said:
            (log.info if starting else log.warning)("no worker", reason=reason)
            if not was_up:
                self._events.worker_missing(reason)
        self._said = "" if was_up else reason

    def _connect_once(self) -> tuple[str, bool]:
        """Run one connection to its end. Returns why it ended, and whether plans could be sent on it."""
        self._calls = []
        with ExitStack() as channels:
            opened = {address: channels.enter_context(self._dialer.open(address)) for address in self._addresses}
            stubs = {address: worker_pb2_grpc.WorkerServiceStub(channel) for address, channel in opened.items()}
            try:
                for address, channel in opened.items():
                    self._await_health(address, channel)
                infos = self._ask(stubs)
                info = as_one(infos)
                self._check(info)
                plans = min(self._plans_in_flight, info.max_plans_in_flight)
                ranks = [RankStream(address, reports=reports(each)) for address, each in infos.items()]
                stream = WorkerStream(info, plans, ranks, self._events)
                heartbeats = [Heartbeat(address, channel, self._dialer) for address, channel in opened.items()]
                reason = self._follow(stream, stubs, _Heard(heartbeats))
            except Unready as error:
                reason = str(error)
            except grpc.FutureCancelledError:
                reason = "stopping"
            except ValueError as error:  # workers we cannot use
                reason = str(error)
                if not self._served:
                    self._useless(reason)
        lost, self._stream = self._stream, None
        if lost is not None:
            stopping = self._stopping.is_set()
            self._events.worker_lost(lost, "the scheduler stops" if stopping else reason, stopping=stopping)
        return reason, lost is not None

    def _await_health(self, address: str, channel: grpc.Channel) -> None:
        """Block until the worker reports SERVING, for as long as it answers that it is not ready. A worker whose health
        cannot be watched is asked at once. Raises ``Unready`` if there is no connection to it."""
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the types leave out its methods
        while not self._stopping.is_set():
            answered = False
            request = health_pb2.HealthCheckRequest()
            watch = self._waiting_for(stub.Watch(request, timeout=_HEALTH_TIMEOUT_S, wait_for_ready=True))
            try:
                for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    answered = True
                    self._report(f"worker {address} is not ready yet: it may still be loading its model")
            except grpc.RpcError as error:
                if error.code() not in _NO_CONNECTION:
                    return
                if not (answered and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise Unready(_named(address, error)) from error
            finally:
                watch.cancel()
        raise Unready("stopping")

    def _ask(self, stubs: dict[str, worker_pb2_grpc.WorkerServiceStub]) -> dict[str, worker_pb2.WorkerInfo]:
        """What each worker is."""
        request, infos = worker_pb2.GetWorkerInfoRequest(), {}
        calls = [
            self._waiting_for(stub.GetWorkerInfo.future(request, timeout=_INFO_TIMEOUT_S, wait_for_ready=True))
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

    def _follow(
        self, stream: WorkerStream, stubs: dict[str, worker_pb2_grpc.WorkerServiceStub], heard: "_Heard"
    ) -> str:
        """Send the same hello to all ranks, and report their results until the first stream ends. Then end the others.
        Returns why the first one ended."""
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
                rank.call = call = self._waiting_for(stubs[rank.address].RunSteps(rank.messages(hello)))
                reader = threading.Thread(
                    target=self._read, args=(stream, rank, call, heard), name="worker-answers", daemon=True
                )
                reader.start()
                readers.append(reader)
            return self._until_ready(stream, heard) or self._serve(stream, heard)
        finally:
            if not self._stopping.is_set():  # else ``stop`` ends them, in its own time
                stream.end()
            for reader in readers:
                reader.join()
            heard.stop()
            stream.finish()  # for gRPC's threads, which wait for plans

    def _until_ready(self, stream: WorkerStream, heard: "_Heard") -> str:
        """Wait until every rank is ready. Returns an empty string, or why one will not be."""
        waiting = {rank.address for rank in stream.ranks}
        until = time.monotonic() + _READY_TIMEOUT_S
        while waiting:
            try:
                rank, ended = heard.get(until)
            except TimeoutError:
                return f"worker {', '.join(sorted(waiting))}: no answer to the hello within {_READY_TIMEOUT_S:g} s"
            if ended is not None:
                return _reason(ended)
            if rank is not None:
                waiting.discard(rank.address)
        return ""

    def _serve(self, stream: WorkerStream, heard: "_Heard") -> str:
        """Return why the first stream ended, when it has."""
        self._stream, self._served, self._said = stream, True, ""
        log.info("worker connected", addresses=",".join(self._addresses), incarnation=stream.info.incarnation_id)
        self._events.worker_connected(stream)
        while (ended := heard.get()[1]) is None:  # one that says again that it is ready
            pass
        return _reason(ended)

    def _read(
        self, stream: WorkerStream, rank: RankStream, call: Iterable[worker_pb2.RunStepsResponse], heard: "_Heard"
    ) -> None:
        """The thread of one rank's answers, which ``call`` gives."""
        ended: str | Exception = f"worker {rank.address} ended the stream"
        try:
            last_s = time.monotonic()
            for response in call:
                kind = response.WhichOneof("payload")
                if kind == "ready":
                    rank.takes_together = response.ready.takes_plans_together
                    heard.put((rank, None))
                    continue
                results = [response.result] if kind == "result" else response.results.results
                before_s, now_s = last_s, time.monotonic()
                for index, result in enumerate(results, 1):
                    # Those that came together ended one after the other since the last that came.
                    ended_s = before_s + (now_s - before_s) * index / len(results)
                    stream.answered(rank, Answer(decode_result(result), result, ended_s) if rank.reports else None)
                last_s = now_s
        except grpc.RpcError as error:
            ended = _named(rank.address, error)
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                log.error("the worker refuses a plan", reason=ended)
        except ValueError as error:  # garbled arrays: a new connection may help
            ended = f"worker {rank.address}: a result that cannot be read: {error}"
        except Exception as error:
            ended = error
        heard.put((rank, ended))


class _Heard:
    """What the threads of the ranks report to the link's thread: a rank is ready (None), or why its stream ended."""

    def __init__(self, heartbeats: Sequence[Heartbeat]) -> None:
        self._queue: queue.SimpleQueue[tuple[RankStream | None, str | Exception | None]] = queue.SimpleQueue()
        self._heartbeats = heartbeats

    def put(self, report: tuple[RankStream, str | Exception | None]) -> None:
        self._queue.put(report)

    def get(self, until_s: float = math.inf) -> tuple[RankStream | None, str | Exception | None]:
        """Wait for the next report, or for a heartbeat that gives its connection up (without a rank). Raises
        ``TimeoutError`` at ``until_s``, a monotonic time."""
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                return self._queue.get(timeout=min(left_s, heartbeat.INTERVAL_S))
            except queue.Empty:
                if reason := next(filter(None, [each.look() for each in self._heartbeats]), ""):
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
