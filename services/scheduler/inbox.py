"""What other threads want of the step loop: calls that it makes on its own thread."""

import queue
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]


class Inbox:
    """Urgent calls, such as a worker's answer, wake the loop up. Clients' requests wait in a line of their own, and
    wake it up only where it says so.

    Each kind keeps its order. The loop's thread alone calls ``wait``, ``urgent`` and ``next_request``.
    """

    def __init__(self) -> None:
        self._urgent: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._requests: deque[tuple[Call, int]] = deque()
        self._rings = False  # a request wakes the loop up

    def put(self, call: Call) -> None:
        self._urgent.put(call)

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

    def wait(self, timeout: float | None, *, for_requests: bool = False) -> list[Call]:
        """Urgent calls; if there are none, the first that comes within ``timeout`` seconds. With ``for_requests`` the
        wait also ends when there is a request."""
        self._rings = for_requests
        if for_requests and self._requests:  # it may have come before it could know that it should ring
            timeout = 0.0
        try:
            first = self._urgent.get(timeout=timeout)
        except queue.Empty:
            return []
        finally:
            self._rings = False
        return [first, *self.urgent()]

    def urgent(self) -> list[Call]:
        """Those that are there."""
        return [self._urgent.get_nowait() for _ in range(self._urgent.qsize())]

    def next_request(self) -> tuple[Call, int]:
        """The one that has waited longest, and its samples."""
        return self._requests.popleft()


def _nothing() -> None:
    """Only rings."""
