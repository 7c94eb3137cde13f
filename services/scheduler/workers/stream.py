"""One connection to the workers of a replica: the same plans to each rank, one answer to a plan from all of them."""

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import grpc

from services.common.plan.result import StepResult
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

# Bytes of a plan that is not sent with others: what a message holds is limited.
_LARGE = 1 << 20


class WorkerEvents(Protocol):
    """What is reported, from threads of the link. ``stream`` tells connections apart: late news of an old one shows."""

    def worker_connected(self, stream: "WorkerStream") -> None: ...

    def worker_answered(self, stream: "WorkerStream", answer: "Answer") -> None: ...

    def worker_lost(self, stream: "WorkerStream", reason: str, *, stopping: bool = False) -> None:
        """The connection has ended. ``stopping``: the scheduler ended it."""

    def worker_missing(self, reason: str) -> None:
        """There is none, for another reason than the last time that this was said."""


class Answer(NamedTuple):
    """The answer to one plan, decoded where it comes in so that the step loop need not."""

    result: StepResult
    message: plan_pb2.StepResult  # as it came, for the record
    received_s: float  # monotonic; of several that came together, as if one by one


class RankStream:
    """The call to one rank."""

    def __init__(self, address: str, *, reports: bool) -> None:
        """``reports``: the tokens come from this rank."""
        self.address, self.reports = address, reports
        self.call: grpc.RpcContext | None = None
        self.takes_together = False  # what its ready said
        self.answered = 0  # plans; under the lock of the ``WorkerStream``
        self._plans: queue.SimpleQueue[plan_pb2.StepPlan | None] = queue.SimpleQueue()  # None = no more

    def send(self, plan: plan_pb2.StepPlan) -> None:
        """Send ``plan``, with others if they are there when a message can go out."""
        self._plans.put(plan)

    def messages(self, hello: worker_pb2.Hello) -> Iterator[worker_pb2.RunStepsRequest]:
        """The outgoing messages, which gRPC takes one by one: ``hello``, then each plan, with those that wait."""
        yield worker_pb2.RunStepsRequest(hello=hello)
        last = False
        while not last and (first := self._plans.get()) is not None:
            plans = [first]
            while self.takes_together and plans[-1].ByteSize() <= _LARGE and not self._plans.empty():
                if (another := self._plans.get()) is None:
                    last = True
                    break
                plans.append(another)
            if len(plans) == 1:
                yield worker_pb2.RunStepsRequest(plan=first)
            else:
                yield worker_pb2.RunStepsRequest(plans=worker_pb2.StepPlans(plans=plans))

    def finish(self) -> None:
        """Send no more."""
        self._plans.put(None)

    def end(self) -> None:
        """At once; what waits to be sent is lost."""
        if self.call is not None:
            self.call.cancel()


class WorkerStream:
    """``send`` may be called by one thread.

    A plan is answered when every rank has answered it; what the one that reports said is held back until then. So who
    has no more than ``plans_in_flight`` unanswered here has no more on any rank, however late one is. It costs next to
    nothing: the last pipeline stage, which reports, is the last to answer anyway, and its ranks wait for one another.
    """

    def __init__(
        self, info: worker_pb2.WorkerInfo, plans_in_flight: int, ranks: Sequence[RankStream], events: WorkerEvents
    ) -> None:
        self.info, self.plans_in_flight, self.ranks = info, plans_in_flight, ranks
        self._events = events
        self._sending = threading.Lock()  # so that every rank gets as many plans
        self._finished = False  # under that lock
        self._lock = threading.Lock()  # of what follows, and of what each rank has answered
        self._held: deque[Answer] = deque()
        self._handed_on = 0  # answers

    def send(self, plan: plan_pb2.StepPlan) -> None:
        """Send ``plan``, which must not change afterwards, to every rank; to none of them after ``finish``."""
        with self._sending:
            if not self._finished:
                for rank in self.ranks:
                    rank.send(plan)

    def answered(self, rank: RankStream, answer: Answer | None) -> None:
        """``rank`` answered one more plan; None = it does not report. Called by the rank's thread."""
        with self._lock:
            rank.answered += 1
            if answer is not None:
                self._held.append(answer)
            through = min(each.answered for each in self.ranks)
            while self._handed_on < through:
                self._handed_on += 1
                self._events.worker_answered(self, self._held.popleft())

    def silent(self) -> str:
        """Addresses of the ranks that have not answered the oldest plan in flight; from any thread."""
        with self._lock:
            return ", ".join(rank.address for rank in self.ranks if rank.answered == self._handed_on)

    def finish(self) -> None:
        """Send no more, from any thread. Each rank gets every plan there was, answers it, and ends its stream. Ranks
        that got different plans would have to start again."""
        with self._sending:
            self._finished = True
            for rank in self.ranks:
                rank.finish()

    def end(self) -> None:
        """Give this connection up, from any thread; the link begins a new one."""
        for rank in self.ranks:
            rank.end()
