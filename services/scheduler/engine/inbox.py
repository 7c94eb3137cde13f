"""What other threads want of the step loop: calls that it makes on its own thread."""

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Call = Callable[[], None]
Answer = TypeVar("Answer")

# Samples taken in between two looks at whether a plan can go out, when the worker waits for one and when it does not.
# One takes about 10 us.
MOST_TAKEN_IN, _MOST_TAKEN_IN_AT_LEISURE = 64, 512
_REST_S = 0.004  # while the worker has its plans, requests are taken in together, so often


class Inbox:
    """Urgent calls, such as a worker's answer, wake the loop up. Clients' requests wait in a line of their own, and
    wake it up only where it says so.

    Each kind keeps its order. The loop's thread alone calls ``turn``, ``wait``, ``take_waited_ns``, ``urgent`` and
    ``next_request``.
    """

    def __init__(self) -> None:
        self._urgent: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._requests: deque[tuple[Call, int]] = deque()
        self._rings = False  # a request wakes the loop up
        self._rests_until = 0.0  # requests gather until then
        self._waited_ns = 0

    def put(self, call: Call) -> None:
        self._urgent.put(call)

    def ask(self, question: Callable[[], Answer]) -> Future[Answer]:
        """Put a call whose result somebody waits for."""
        answer: Future[Answer] = Future()

        def call() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # the asker's trouble, not the loop's
                    answer.set_exception(error)

        self.put(call)
        return answer

    def put_request(self, call: Call, samples: int = 1) -> None:
        """``samples``: how many it is about, so how long it may take."""
        self._requests.append((call, samples))
        if self._rings:
            self._rings = False
            self._urgent.put(_nothing)

    @property
    def requests(self) -> int:
        """Those that wait."""
        return len(self._requests)

    def turn(self, due_s: float | None, worker_waits: Callable[[], bool]) -> bool:
        """Wait until something happened, for ``due_s`` seconds at most, and make the calls; whether there were any.

        The worker's answers come first; clients' requests are taken in as long as the worker has its plans, and only a
        few of them when it waits for one."""
        calls, taken = self._wait_for_all(due_s, worker_waits), 0
        for call in calls:
            call()
        while self._requests:
            if taken >= (MOST_TAKEN_IN if worker_waits() else _MOST_TAKEN_IN_AT_LEISURE):
                break
            request, samples = self.next_request()
            for call in self.urgent():  # now: what was posted before the request, such as its sink, is among it
                call()
            request()
            taken += samples
        if taken and not self._requests:
            self._rests_until = time.monotonic() + _REST_S
        return bool(calls) or taken > 0

    def _wait_for_all(self, due_s: float | None, worker_waits: Callable[[], bool]) -> list[Call]:
        """Until something is urgent or due, or a request is there; while the worker has its plans, requests gather."""
        rest_s = self._rests_until - time.monotonic()
        if rest_s > 0 and not worker_waits():
            return self.wait(rest_s if due_s is None else min(rest_s, due_s))
        return self.wait(due_s, for_requests=True)

    def wait(self, timeout: float | None, *, for_requests: bool = False) -> list[Call]:
        """Urgent calls; if there are none, the first that comes within ``timeout`` seconds. With ``for_requests`` the
        wait also ends when there is a request."""
        began = time.perf_counter_ns()
        self._rings = for_requests
        if for_requests and self._requests:  # it may have come before it could know that it should ring
            timeout = 0.0
        try:
            first = self._urgent.get(timeout=timeout)
        except queue.Empty:
            return []
        finally:
            self._rings = False
            self._waited_ns += time.perf_counter_ns() - began
        return [first, *self.urgent()]

    def take_waited_ns(self) -> int:
        """For how long ``wait`` has waited since this was asked last."""
        waited, self._waited_ns = self._waited_ns, 0
        return waited

    def urgent(self) -> list[Call]:
        """Those that are there."""
        return [self._urgent.get_nowait() for _ in range(self._urgent.qsize())]

    def next_request(self) -> tuple[Call, int]:
        """The one that has waited longest, and its samples."""
        return self._requests.popleft()


def _nothing() -> None:
    """Only rings."""
