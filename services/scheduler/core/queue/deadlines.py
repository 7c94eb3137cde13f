"""Deadlines of requests."""

import heapq
from itertools import count
from weakref import ref

from services.scheduler.core.request import Request


class Deadlines:
    """A heap of deadlines, with weak references to the requests. Owned by the core.

    Entries of finished requests are skipped, and removed when the heap has doubled since the last removal.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ref[Request]]] = []
        self._order = count()
        self._sweep_at = 1024

    def add(self, request: Request) -> None:
        """Add the deadline of ``request``, if it has one."""
        if request.deadline_ms is None:
            return
        heapq.heappush(self._heap, (request.deadline_ms, next(self._order), ref(request)))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if _unfinished(entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = max(1024, 2 * len(self._heap))

    def next_ms(self) -> int | None:
        """Return the earliest deadline of an unfinished request, in milliseconds of the monotonic clock, or None."""
        while self._heap and not _unfinished(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[Request]:
        """Return the unfinished requests with a deadline at or before ``now_ms``, each once."""
        found = []
        while (earliest := self.next_ms()) is not None and earliest <= now_ms:
            if (request := heapq.heappop(self._heap)[2]()) is not None:
                found.append(request)
        return found


def _unfinished(known: "ref[Request]") -> bool:
    request = known()
    return request is not None and request.unfinished > 0
