"""One RunSteps stream: gRPC's threads, of which one receives and one sends, on one side, the engine's on the other."""

import queue

from services.common.errors import InvalidRequest, TokaError
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

_END = object()
# Bytes of a result that is not sent with others: what a message holds is limited.
_LARGE = 1 << 20


class Superseded(Exception):
    """A new hello has taken the worker over; this stream ends with ABORTED."""


class Stream:
    """Answers wait in a queue that ``plans_in_flight`` bounds: the client may not have more plans unanswered."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        self.plans_in_flight, self.scheduler_id = hello.plans_in_flight, hello.scheduler_id
        self.stream_id = hello.stream_id
        self.closed = False  # set under the servicer's lock, read by the engine's threads
        self._together = hello.takes_results_together
        self._outbox: queue.SimpleQueue[plan_pb2.StepResult | Exception | object] = queue.SimpleQueue()
        self._last: Exception | object | None = None  # what the stream ends with, once it was taken from the outbox
        self._received = 0  # plans; of the receiving thread
        self._answered = 0  # of the sending thread

    # -- from the engine's threads

    def answer(self, result: plan_pb2.StepResult) -> None:
        self._outbox.put(result)

    def fail(self, error: TokaError) -> None:
        """End the stream with ``error``, behind the answers so far."""
        self._outbox.put(error)

    def finish(self) -> None:
        """End the stream well, behind the answers so far."""
        self._outbox.put(_END)

    # -- from gRPC's threads

    def end(self, error: Exception) -> None:
        """From any thread: as ``fail``."""
        self._outbox.put(error)

    def plans_of(self, request: worker_pb2.RunStepsRequest) -> list[plan_pb2.StepPlan]:
        """What a message brings. Raises ``InvalidRequest``, also for more plans than were agreed."""
        kind = request.WhichOneof("payload")
        if kind not in ("plan", "plans"):
            raise InvalidRequest("after the hello every message must be a plan", field="plan")
        plans = [request.plan] if kind == "plan" else list(request.plans.plans)
        self._received += len(plans)
        if self._received - self._answered > self.plans_in_flight:
            raise InvalidRequest(
                f"more plans unanswered than the hello's plans_in_flight={self.plans_in_flight}", field=kind
            )
        return plans

    def next_message(self) -> worker_pb2.RunStepsResponse | None:
        """The next answer, with those behind it that are there if the client takes them together. None at the end;
        raises what the stream failed with."""
        results = self._take() if self._last is None else []
        if results:
            self._answered += len(results)  # before the client has them, and may send as many plans
            if len(results) == 1:
                return worker_pb2.RunStepsResponse(result=results[0])
            return worker_pb2.RunStepsResponse(results=worker_pb2.StepResults(results=results))
        if isinstance(self._last, Exception):
            raise self._last
        return None

    def _take(self) -> list[plan_pb2.StepResult]:
        """Waits for one. None at all when the end comes first."""
        results = []
        item = self._outbox.get()
        try:
            while isinstance(item, plan_pb2.StepResult):
                results.append(item)
                if not self._together or item.ByteSize() > _LARGE:
                    return results
                item = self._outbox.get_nowait()
            self._last = item
        except queue.Empty:
            pass
        return results
