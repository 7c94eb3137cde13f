"""The state of a RunSteps stream, shared by the engine's threads and two of gRPC's: one receives, one sends."""

import queue
import threading
from collections import deque

from services.common.errors import InvalidRequest
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

_END = object()
_Item = plan_pb2.StepResult | Exception | object  # a result, the error that ends the stream, or _END
# From this many bytes on, a result ends its message, since the size of a message is limited.
_LARGE_BYTES = 1 << 20


class Superseded(Exception):
    """Another scheduler has taken the worker over; the stream ends with ABORTED."""


class Stream:
    """An open stream with its queue of results. ``plans_in_flight`` bounds the plans without a result, so the queue."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        self.plans_in_flight, self.scheduler_id = hello.plans_in_flight, hello.scheduler_id
        self.stream_id = hello.stream_id
        self.closed = False  # set under the servicer's lock, read by the engine's threads
        self._together = hello.takes_results_together
        self._lock = threading.Lock()  # protects the next field, and the order of the outbox
        self._waiting: list[_Item] = []
        self._outbox: queue.SimpleQueue[list[_Item]] = queue.SimpleQueue()
        self._taken: deque[_Item] = deque()  # from the outbox, and not sent yet; used by the sending thread
        self._last: _Item | None = None  # the end of the stream, once it is taken from the outbox
        self._received = 0  # plans; used by the receiving thread
        self._answered = 0  # plans; used by the sending thread

    def answer(self, result: plan_pb2.StepResult, *, with_next: bool = False) -> None:
        """Queue ``result``. ``with_next``: it is sent with what is queued next. Any thread may call it."""
        self._put(result, wait=with_next)

    def fail(self, error: Exception) -> None:
        """End the stream with ``error``, after the queued results. Any thread may call it."""
        self._put(error)

    def finish(self) -> None:
        """End the stream without an error, after the queued results. Any thread may call it."""
        self._put(_END)

    def _put(self, item: _Item, *, wait: bool = False) -> None:
        """Put ``item`` into the outbox, together with the items before it that had to ``wait`` for the next one."""
        with self._lock:
            self._waiting.append(item)
            if not wait:
                self._outbox.put(self._waiting)
                self._waiting = []

    def plans_of(self, request: worker_pb2.RunStepsRequest) -> list[plan_pb2.StepPlan]:
        """Return the plans of a message.

        Raises ``InvalidRequest`` for a message without plans, and for more plans in flight than the hello allows.
        """
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
        """Wait for results and return them as a message, or None at the end. Raises the error of a failed stream.

        A message has several results only if the hello allows that.
        """
        results = self._take() if self._last is None else []
        if results:
            self._answered += len(results)  # before the client receives them, since it may then send more plans
            if len(results) == 1:
                return worker_pb2.RunStepsResponse(result=results[0])
            return worker_pb2.RunStepsResponse(results=worker_pb2.StepResults(results=results))
        if isinstance(self._last, Exception):
            raise self._last
        return None

    def _take(self) -> list[plan_pb2.StepResult]:
        """Wait for a result, and return it with those behind it. Return an empty list at the end of the stream."""
        results: list[plan_pb2.StepResult] = []
        try:
            while isinstance(item := self._next_item(wait=not results), plan_pb2.StepResult):
                results.append(item)
                if not self._together or item.ByteSize() > _LARGE_BYTES:
                    return results
            self._last = item
        except queue.Empty:
            pass
        return results

    def _next_item(self, *, wait: bool) -> _Item:
        """Return the next item of the outbox. Raises ``queue.Empty`` if there is none and it must not ``wait``."""
        if not self._taken:
            self._taken.extend(self._outbox.get(block=wait))
        return self._taken.popleft()
