"""A heap whose items can be moved and discarded."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class LazyHeap(Generic[K, T]):
    """Items by (first, second), lowest first, each once. What is discarded stays in the heap until it is in the way."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, K, T]] = []
        self._entries: dict[T, tuple[int, K, T]] = {}  # an entry of the heap is stale when it is not here

    def put(self, first: int, second: K, item: T) -> None:
        """Add an item, or move it."""
        entry = (first, second, item)
        self._entries[item] = entry
        heappush(self._heap, entry)
        self._trim()

    def discard(self, item: T) -> None:
        del self._entries[item]
        self._trim()

    def _trim(self) -> None:
        """Stale entries are at most about half, and none is first."""
        heap, entries = self._heap, self._entries
        if len(heap) > 2 * len(entries) + 64:
            heap[:] = entries.values()
            heapify(heap)
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)

    @property
    def first(self) -> int:
        """``first`` of the lowest item. Raises ``IndexError`` if there is none."""
        return self._heap[0][0]

    def __iter__(self) -> Iterator[tuple[int, K, T]]:
        """In order; the first k cost k log k, however many there are."""
        heap, entries = self._heap, self._entries
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = frontier[0]
            child = 2 * index + 1
            if child < len(heap):
                heapreplace(frontier, (heap[child], child))
                if child + 1 < len(heap):
                    heappush(frontier, (heap[child + 1], child + 1))
            else:
                heappop(frontier)
            if entries.get(entry[2]) is entry:
                yield entry
