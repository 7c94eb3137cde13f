"""The step stream to one worker, kept up: connect, say hello, carry plans and results, and begin again when lost."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import grpc
import structlog

from services.common.rpc.channel import CHANNEL_OPTIONS
from services.scheduler.core.plan import Result
from services.scheduler.workers.codec import decode_result
from tokasaurus.worker.v1 import plan_pb2, worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_INFO_TIMEOUT_S = 10.0
_READY_TIMEOUT_S = 30.0  # a hello that is not answered for so long never will be
# Bytes of a plan that is not sent with others: what a message holds is limited.
_LARGE = 1 << 20


class WorkerEvents(Protocol):
    """What the link reports, from its own thread. ``stream`` counts connections: late news of an old one shows."""

    def worker_connected(self, stream: "WorkerStream") -> None: ...

    def worker_answered(self, stream: "WorkerStream", answer: "Answer") -> None: ...

    def worker_lost(self, stream: "WorkerStream", reason: str) -> None: ...


class Answer(NamedTuple):
    """A worker's answer to one plan, decoded here so that the step loop need not."""

    result: Result
    message: plan_pb2.StepResult  # as it came, for the record
    received_s: float  # monotonic; of several that came together, as if one by one


class WorkerStream:
    """One connection. ``send`` may be called by one thread."""

    def __init__(self, info: worker_pb2.WorkerInfo, plans_in_flight: int, scheduler_id: str) -> None:
        self.info, self.plans_in_flight = info, plans_in_flight
        self.call: grpc.Call | None = None
        self.takes_together = False  # what the worker's ready said
        self._scheduler_id = scheduler_id
        self._plans: queue.SimpleQueue[plan_pb2.StepPlan | None] = queue.SimpleQueue()  # None = no more

    def send(self, plan: plan_pb2.StepPlan) -> None:
        """Send ``plan``, with others if they are there when a message can go out."""
        self._plans.put(plan)

    def messages(self) -> Iterator[worker_pb2.RunStepsRequest]:
        """What goes out, for gRPC to take one by one."""
        yield worker_pb2.RunStepsRequest(
            hello=worker_pb2.Hello(
                scheduler_id=self._scheduler_id,
                expected_incarnation_id=self.info.incarnation_id,
                plans_in_flight=self.plans_in_flight,
                takes_results_together=True,
            )
        )
        while (plan := self._plans.get()) is not None:
            plans = [plan]
            while self.takes_together and plans[-1].ByteSize() <= _LARGE and not self._plans.empty():
                if (plan := self._plans.get()) is None:
                    return
                plans.append(plan)
            if len(plans) == 1:
                yield worker_pb2.RunStepsRequest(plan=plan)
            else:
                yield worker_pb2.RunStepsRequest(plans=worker_pb2.StepPlans(plans=plans))

    def close(self) -> None:
        """The call has ended."""
        self._plans.put(None)
        self.call.cancel()

    def end(self) -> None:
        """Give this connection up; the link begins a new one."""
        if self.call is not None:
            self.call.cancel()


class WorkerLink:
    """Runs on a thread of its own: the blocking API costs no event loop and disturbs none."""

    def __init__(
        self,
        address: str,
        scheduler_id: str,
        plans_in_flight: int,
        events: WorkerEvents,
        check: Callable[[worker_pb2.WorkerInfo], None],
        useless: Callable[[str], None],
    ) -> None:
        """``plans_in_flight``: the most there will ever be, if the worker takes them.

        ``check`` raises ``ValueError`` for a worker that this scheduler cannot use. When that is the first worker there
        ever was, ``useless`` is told the reason, from the link's thread: both were started with flags that do not go
        together, and waiting would not help. So it is when the thread itself cannot go on.
        """
        self._address = address
        self._scheduler_id = scheduler_id
        self._plans_in_flight = plans_in_flight
        self._events = events
        self._check = check
        self._useless = useless
        self._served = False  # some worker was connected
        self._stopping = threading.Event()
        self._call: grpc.Future | None = None  # what the thread waits for
        self._thread = threading.Thread(target=self._run, name="worker-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the stream and the thread."""
        self._stopping.set()
        if self._call is not None:
            self._call.cancel()  # closing the channel under a running call, from here, would not be safe
        self._thread.join()

    def _waiting_for(self, call: grpc.Future) -> grpc.Future:
        """``call``, which ``stop`` will cancel: it sets the flag first and looks for the call then."""
        self._call = call
        if self._stopping.is_set():
            call.cancel()
        return call

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        said = ""
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
            if reason != said and not self._stopping.is_set():
                log.warning("no worker", address=self._address, reason=reason)
            said = "" if was_up else reason
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF_S)

    def _connect_once(self) -> tuple[str, bool]:
        """One connection from beginning to end: (why it ended, whether it was up)."""
        stream, was_up, reason = None, False, ""
        with grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                asking = stub.GetWorkerInfo.future(
                    worker_pb2.GetWorkerInfoRequest(), timeout=_INFO_TIMEOUT_S, wait_for_ready=True
                )
                info = self._waiting_for(asking).result().info
                self._check(info)
                stream = self._open(stub, info)
                unanswered = threading.Timer(_READY_TIMEOUT_S, stream.end)
                unanswered.daemon = True
                unanswered.start()
                last_s = time.monotonic()
                for response in stream.call:
                    kind = response.WhichOneof("payload")
                    if kind == "ready":
                        unanswered.cancel()
                        was_up = self._served = True
                        stream.takes_together = response.ready.takes_plans_together
                        log.info("worker connected", address=self._address, incarnation=info.incarnation_id)
                        self._events.worker_connected(stream)
                        continue
                    results = [response.result] if kind == "result" else response.results.results
                    before_s, now_s = last_s, time.monotonic()
                    for index, result in enumerate(results, 1):
                        # Those that came together ended one after the other since the last that came.
                        ended_s = before_s + (now_s - before_s) * index / len(results)
                        self._events.worker_answered(stream, Answer(decode_result(result), result, ended_s))
                    last_s = now_s
                reason = "the worker ended the stream"
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    log.error("the worker refuses a plan", reason=error.details())
            except grpc.FutureCancelledError:
                reason = "stopping"
            except ValueError as error:  # a worker we cannot use
                reason = str(error)
                if not self._served:
                    self._useless(reason)
            finally:
                if stream is not None:
                    unanswered.cancel()
                    stream.close()
        if was_up:
            self._events.worker_lost(stream, reason)
        return reason, was_up

    def _open(self, stub: worker_pb2_grpc.WorkerServiceStub, info: worker_pb2.WorkerInfo) -> WorkerStream:
        plans = min(self._plans_in_flight, info.max_plans_in_flight)
        stream = WorkerStream(info, plans, self._scheduler_id)
        stream.call = self._waiting_for(stub.RunSteps(stream.messages()))
        return stream
