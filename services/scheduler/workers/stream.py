"""A connection to the workers of a replica: each rank gets the same plans, and together they return one result each."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import grpc

from services.common.plan.result import StepResult
from services.scheduler.workers.weights import WorkerWeights
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

# Most bytes of plans that share a message, whose size is limited. A larger plan is sent alone.
_MOST_BYTES_TOGETHER = 256 * 1024


class WorkerEvents(Protocol):
    """Callbacks on the link's threads. ``stream`` identifies the connection, so that late events can be ignored."""

    def worker_connected(self, stream: "WorkerStream") -> None: ...

    def worker_result(self, stream: "WorkerStream", result: "ReceivedResult") -> None: ...

    def worker_lost(self, stream: "WorkerStream", reason: str, *, stopping: bool = False) -> None:
        """Report the end of a connection. ``stopping`` means that the scheduler ended it."""

    def worker_missing(self, reason: str) -> None:
        """Report why there is no worker, when the reason changes."""


class ReceivedResult(NamedTuple):
    """Result of one plan, decoded by the receiving thread to save time of the step loop."""

    result: StepResult
    message: plan_pb2.StepResult  # for the recorder
    received_s: float  # monotonic; estimated for results in one message


class RankStream:
    """Call to one rank."""

    def __init__(self, address: str, *, reports: bool) -> None:
        """Create the stream of a rank. ``reports`` means that this rank returns the tokens."""
        self.address, self.reports = address, reports
        self.call: grpc.RpcContext | None = None
        self.takes_together = False  # the worker accepts several plans in a message
        self.results = 0  # number of results; protected by the lock of the ``WorkerStream``
        self._plans: queue.SimpleQueue[plan_pb2.StepPlan | None] = queue.SimpleQueue()  # None ends the stream

    def send(self, plan: plan_pb2.StepPlan) -> None:
        """Queue ``plan``. Queued plans may share a message."""
        self._plans.put(plan)

    def messages(self, hello: worker_pb2.Hello) -> Iterator[worker_pb2.RunStepsRequest]:
        """Yield the messages to send: ``hello``, then the plans. gRPC requests them one by one."""
        yield worker_pb2.RunStepsRequest(hello=hello)
        held: list[plan_pb2.StepPlan | None] = []  # what was taken from the queue and begins the next message
        while (first := held.pop() if held else self._plans.get()) is not None:
            plans, size = [first], 0
            while self.takes_together and not held and not self._plans.empty():
                size = size or first.ByteSize()  # takes long for many prompts, and is not needed for a single plan
                another = self._plans.get()
                if another is None or (size := size + another.ByteSize()) > _MOST_BYTES_TOGETHER:
                    held.append(another)
                else:
                    plans.append(another)
            if len(plans) == 1:
                yield worker_pb2.RunStepsRequest(plan=first)
            else:
                yield worker_pb2.RunStepsRequest(plans=worker_pb2.StepPlans(plans=plans))

    def finish(self) -> None:
        """Send no more plans."""
        self._plans.put(None)

    def end(self) -> None:
        """Cancel the call. Queued plans are lost."""
        if self.call is not None:
            self.call.cancel()


class WorkerStream:
    """Streams to all ranks. ``send`` may be called by one thread.

    A plan has its result when every rank has returned its own. The tokens of the reporting rank are withheld until
    then, so ``plans_in_flight`` limits the plans on every rank. This takes hardly any time, since the reporting stage
    is the last one of the pipeline, and the ranks of a stage wait for each other.
    """

    def __init__(
        self,
        info: worker_pb2.WorkerInfo,
        plans_in_flight: int,
        ranks: Sequence[RankStream],
        events: WorkerEvents,
        weights: WorkerWeights,
        weights_version: str,
        is_asleep: Callable[[], bool] = lambda: False,
    ) -> None:
        """``weights_version`` is that of all workers at the start of the stream.

        ``is_asleep`` returns whether they are asleep now. Any thread may call it.
        """
        self.info, self.plans_in_flight, self.ranks = info, plans_in_flight, ranks
        self.weights, self.weights_version, self.is_asleep = weights, weights_version, is_asleep
        self._events = events
        self._sending = threading.Lock()  # so that every rank gets the same plans
        self._finished = False  # protected by ``_sending``
        self._lock = threading.Lock()  # protects the fields below and the ranks' ``results``
        self._withheld: deque[ReceivedResult] = deque()
        self._delivered = 0  # results

    def send(self, plan: plan_pb2.StepPlan) -> None:
        """Send ``plan``, which must not change afterwards, to every rank. Does nothing after ``finish``."""
        with self._sending:
            if not self._finished:
                for rank in self.ranks:
                    rank.send(plan)

    def result_received(self, rank: RankStream, result: ReceivedResult | None) -> None:
        """Count a result of ``rank``. It is None for a rank that does not report. Called by the rank's thread."""
        with self._lock:
            rank.results += 1
            if result is not None:
                self._withheld.append(result)
            completed = min(each.results for each in self.ranks)
            while self._delivered < completed:
                self._delivered += 1
                self._events.worker_result(self, self._withheld.popleft())

    def overdue_ranks(self) -> str:
        """Return the addresses of the ranks without a result of the oldest plan in flight. Any thread may call."""
        with self._lock:
            return ", ".join(rank.address for rank in self.ranks if rank.results == self._delivered)

    def finish(self) -> None:
        """Send no more plans. Any thread may call.

        Each rank receives all sent plans, returns their results, and ends its stream. Ranks with different plans would
        have to restart.
        """
        with self._sending:
            self._finished = True
            for rank in self.ranks:
                rank.finish()

    def end(self) -> None:
        """Cancel all calls. Any thread may call. The link then opens a new connection."""
        for rank in self.ranks:
            rank.end()
