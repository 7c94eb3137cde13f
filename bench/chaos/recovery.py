"""The time from a fault until all streams have progressed."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_STILL_S = 5.0  # time without progress after which a stream stands still


class Ask:
    """A question of a client, over all attempts. It notifies recoveries when it progresses."""

    def __init__(self) -> None:
        self.gateway = ""  # of the current attempt
        self.moved_at = time.monotonic()
        self.watching: list[Recovery] = []

    def progress(self) -> None:
        """Record that a part of the answer has arrived, or all of it."""
        self.moved_at = time.monotonic()
        for recovery in self.watching:
            recovery.moved(self)
        self.watching.clear()


class Recovery:
    """The recovery from a fault. It ends when every affected stream has progressed."""

    def __init__(self, kind: str, begin: float, waiting: Iterable[Ask]) -> None:
        self.kind = kind
        self.seconds: float | None = None
        self._begin = begin
        self._waiting = set(waiting)
        for ask in self._waiting:
            ask.watching.append(self)

    @property
    def awaited(self) -> bool:
        return bool(self._waiting)

    def moved(self, ask: Ask) -> None:
        self._waiting.discard(ask)
        if not self._waiting:
            self.seconds = time.monotonic() - self._begin


class Recoveries:
    """The recoveries of all faults. ``open`` has the running streams."""

    def __init__(self) -> None:
        self.open: set[Ask] = set()
        self._all: list[Recovery] = []

    def begin(self, kind: str, gateway: str | None) -> None:
        """Record that a fault begins, for streams of ``gateway`` or for all. Streams that stand still do not count."""
        now = time.monotonic()
        moving = [ask for ask in self.open if ask.moved_at > now - _STILL_S and gateway in (None, ask.gateway)]
        self._all.append(Recovery(kind, now, moving))

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return figures by kind of fault. ``unmoved``: faults after which a stream never progressed."""
        found: dict[str, list[Recovery]] = defaultdict(list)
        for recovery in self._all:
            found[recovery.kind].append(recovery)
        return {kind: _summary(recoveries) for kind, recoveries in sorted(found.items())}


def _summary(recoveries: list[Recovery]) -> dict[str, Any]:
    times = [recovery.seconds for recovery in recoveries if recovery.seconds is not None]
    summary: dict[str, Any] = {"count": len(recoveries), "median_s": None, "worst_s": None}
    if times:
        summary |= {"median_s": round(statistics.median(times), 2), "worst_s": round(max(times), 2)}
    if unmoved := sum(recovery.awaited for recovery in recoveries):
        summary["unmoved"] = unmoved
    return summary
