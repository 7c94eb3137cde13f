"""Queue of the calls that other threads make on the step loop's thread."""

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from services.common.boundaries import errors_to

Call = Callable[[], None]
T = TypeVar("T")

# Samples submitted between two checks whether a plan can be sent, when the worker waits for one and when it does not. A
# sample takes about 10 us.
MOST_SUBMITTED, _MOST_SUBMITTED_WHILE_BUSY = 64, 512
_GATHER_S = 0.004  # while the worker is busy, requests are submitted together once in this time


class Inbox:
    """Queue of urgent calls, such as a worker's result, and of clients' requests.

    An urgent call wakes up the loop. A request wakes it up only if the loop waits for requests. Each kind keeps its
    order. Only the loop's thread calls ``run_once``, ``wait``, ``take_waited_ns``, ``urgent`` and ``next_request``.
    """

    def __init__(self) -> None:
        self._urgent: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._requests: deque[tuple[Call, int]] = deque()
        self._wake_for_requests = False
        self._gather_until = 0.0
        self._waited_ns = 0

    def put(self, call: Call) -> None:
        self._urgent.put(call)

    def ask(self, call: Callable[[], T], *, after_requests: bool = False) -> Future[T]:
        """Put a call and return the future of its result. With ``after_requests``, it runs after the queued requests.

        Otherwise it is urgent.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                with errors_to(future.set_exception):  # an error of the caller must not end the loop
                    future.set_result(call())

        (self.put_request if after_requests else self.put)(run)
        return future

    def put_request(self, call: Call, samples: int = 1) -> None:
        """Queue the request ``call``. ``samples`` is its number of samples, which determines how long it takes."""
        self._requests.append((call, samples))
        if self._wake_for_requests:
            self._wake_for_requests = False
            self._urgent.put(_no_call)

    @property
    def requests(self) -> int:
        """The number of queued requests."""
        return len(self._requests)

    def run_once(self, due_s: float | None, worker_waits: Callable[[], bool]) -> bool:
        """Wait at most ``due_s`` seconds for calls, and run them. Return whether there were any.

        Urgent calls run first. Many requests are submitted while the worker is busy, and few when it waits for a plan.
        """
        calls, submitted = self._wait_for_all(due_s, worker_waits), 0
        for call in calls:
            call()
        while self._requests:
            if submitted >= (MOST_SUBMITTED if worker_waits() else _MOST_SUBMITTED_WHILE_BUSY):
                break
            request, samples = self.next_request()
            for call in self.urgent():  # includes calls that precede the request, such as the opening of its sink
                call()
            request()
            submitted += samples
        if submitted and not self._requests:
            self._gather_until = time.monotonic() + _GATHER_S
        return bool(calls) or submitted > 0

    def _wait_for_all(self, due_s: float | None, worker_waits: Callable[[], bool]) -> list[Call]:
        """Wait for urgent calls, requests or the time ``due_s``. While the worker is busy, let requests accumulate."""
        gather_s = self._gather_until - time.monotonic()
        if gather_s > 0 and not worker_waits():
            return self.wait(gather_s if due_s is None else min(gather_s, due_s))
        return self.wait(due_s, for_requests=True)

    def wait(self, timeout: float | None, *, for_requests: bool = False) -> list[Call]:
        """Return the urgent calls. If there are none, wait at most ``timeout`` seconds for the first.

        With ``for_requests``, the wait also ends when there is a request.
        """
        began = time.perf_counter_ns()
        self._wake_for_requests = for_requests
        if for_requests and self._requests:  # it may have arrived before the flag was set
            timeout = 0.0
        try:
            first = self._urgent.get(timeout=timeout)
        except queue.Empty:
            return []
        finally:
            self._wake_for_requests = False
            self._waited_ns += time.perf_counter_ns() - began
        return [first, *self.urgent()]

    def take_waited_ns(self) -> int:
        """Return the time spent in ``wait`` since the last call."""
        waited, self._waited_ns = self._waited_ns, 0
        return waited

    def urgent(self) -> list[Call]:
        """Return the urgent calls that are queued now."""
        return [self._urgent.get_nowait() for _ in range(self._urgent.qsize())]

    def next_request(self) -> tuple[Call, int]:
        """Return the oldest request, and its number of samples."""
        return self._requests.popleft()


def _no_call() -> None:
    """Do nothing. This call only wakes up the loop."""
