"""Allocation of ranges of indices."""

import bisect


class Arena:
    """First-fit allocator that merges adjacent free ranges. ``size`` is the end of the highest range ever taken."""

    def __init__(self) -> None:
        self.size = 0
        self.used = 0
        self._holes: list[tuple[int, int]] = []  # (start, length), ascending, never adjacent

    def take(self, length: int) -> int:
        """Allocate a range of ``length`` indices. Return its start."""
        self.used += length
        for index, (start, room) in enumerate(self._holes):
            if room >= length:
                self._holes[index : index + 1] = [(start + length, room - length)] if room > length else []
                return start
        start, self.size = self.size, self.size + length
        return start

    def give(self, start: int, length: int) -> None:
        """Release a range that was taken."""
        self.used -= length
        at = bisect.bisect(self._holes, (start, 0))
        if at < len(self._holes) and self._holes[at][0] == start + length:
            length += self._holes.pop(at)[1]
        if at > 0 and sum(self._holes[at - 1]) == start:
            start, before = self._holes.pop(at - 1)
            length, at = length + before, at - 1
        self._holes.insert(at, (start, length))
