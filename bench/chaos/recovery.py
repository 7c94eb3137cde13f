"""How long it takes until everything goes on after a fault."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_STILL_S = 5.0  # without anything new


class Ask:
    """One question of one client, over all attempts. What watches it learns when it has moved."""

    def __init__(self) -> None:
        self.gateway = ""  # that is asked now
        self.moved_at = time.monotonic()
        self.watching: list[Recovery] = []

    def progress(self) -> None:
        """Something of the answer has come, or all of it."""
        self.moved_at = time.monotonic()
        for recovery in self.watching:
            recovery.moved(self)
        self.watching.clear()


class Recovery:
    """Since a fault, until every stream that it may have struck has had something new."""

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
    """Of all faults. ``open`` is the streams that run now."""

    def __init__(self) -> None:
        self.open: set[Ask] = set()
        self._all: list[Recovery] = []

    def begin(self, kind: str, gateway: str | None) -> None:
        """A fault strikes now, at streams of ``gateway`` or at any. Those that stand still do so for another one."""
        now = time.monotonic()
        moving = [ask for ask in self.open if ask.moved_at > now - _STILL_S and gateway in (None, ask.gateway)]
        self._all.append(Recovery(kind, now, moving))

    def figures(self) -> dict[str, dict[str, Any]]:
        """By kind. ``unmoved``: faults after which a stream never had anything new."""
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
