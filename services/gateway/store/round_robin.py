"""Round-robin order of fairness keys, and of the Batch jobs of each key."""

from collections.abc import Iterable

_RECORDED = 4096  # keys and Batch jobs


class RoundRobin:
    """Records when keys and Batch jobs were served. The one served longest ago goes first.

    A key without work keeps its record for a while. Otherwise a key that returns at once with more work would always
    be new, and go first each time.
    """

    def __init__(self) -> None:
        self._served: dict[str | int, int] = {}  # number of the turn, by key and by batch, the latest at the end
        self._count = 0

    def order(self, found: Iterable[tuple[str, int]]) -> list[int]:
        """Return the Batch jobs in ``found``, pairs of key and Batch job, in the order in which to serve them."""
        turn = self._served.get
        return [seq for key, seq in sorted(found, key=lambda each: (turn(each[0], 0), turn(each[1], 0), each[1]))]

    def served(self, key: str, seq: int) -> None:
        """Record that the Batch job ``seq`` of ``key`` was served now."""
        self._count += 1
        for name in (key, seq):
            self._served.pop(name, None)
            self._served[name] = self._count
        while len(self._served) > _RECORDED:
            del self._served[next(iter(self._served))]
