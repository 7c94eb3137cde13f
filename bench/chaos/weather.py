"""A record of the faults with their times and targets. It shows which broken connections are expected."""

import time
from dataclasses import dataclass

# Time after a fault in which its effects may appear. A broken idle connection is noticed at its next use; a connection
# whose other end exited behind a partition is noticed when its keepalive fails.
_GRACE_S = 2.0
_PARTED_GRACE_S = 40.0
_NEAR_S = 40.0


@dataclass(eq=False)
class Trouble:
    """A fault, from its begin until its targets serve again. Times are those of ``time.monotonic``."""

    kind: str
    targets: tuple[str, ...]
    begin: float
    end: float | None = None

    def felt(self, since: float) -> bool:
        """Return whether the fault can have broken connections that were used since ``since``."""
        grace = _PARTED_GRACE_S if self.kind.startswith("partition") else _GRACE_S
        return self.end is None or self.end + grace >= since


class Weather:
    """All faults so far. Used on the program's event loop."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.troubles: list[Trouble] = []

    def strikes(self, kind: str, targets: tuple[str, ...]) -> Trouble:
        """Record the begin of a fault. The caller sets its end."""
        trouble = Trouble(kind, targets, time.monotonic())
        self.troubles.append(trouble)
        return trouble

    def excuses(self, name: str, since: float) -> bool:
        """Return whether a fault can have broken a connection to ``name`` that was used since ``since``."""
        return any(name in trouble.targets and trouble.felt(since) for trouble in self.troubles)

    def near(self, begin: float, end: float) -> list[str]:
        """Describe the faults around this time."""
        near = [
            trouble
            for trouble in self.troubles
            if trouble.begin <= end and (trouble.end is None or trouble.end >= begin - _NEAR_S)
        ]
        return [self.told(trouble) for trouble in near]

    def told(self, trouble: Trouble) -> str:
        """Describe ``trouble``, with times in seconds since the load began."""
        end = "not over" if trouble.end is None else f"over at {trouble.end - self.began:.1f}"
        return f"{trouble.begin - self.began:.1f}: {trouble.kind} of {' and '.join(trouble.targets)}, {end}"
