"""Which faults there were, when, and on whom: what excuses a broken connection, and what a story tells."""

import time
from dataclasses import dataclass

# An idle connection that broke meanwhile is found when it is used next; one whose other end went away behind a
# partition when its keepalive gives up.
_GRACE_S = 2.0
_PARTED_GRACE_S = 40.0
_NEAR_S = 40.0


@dataclass(eq=False)
class Trouble:
    """One fault, from its begin until whom it struck serves again. Times of ``time.monotonic``."""

    kind: str
    targets: tuple[str, ...]
    begin: float
    end: float | None = None

    def felt(self, since: float) -> bool:
        """Whether connections that were used from ``since`` on may have broken by it."""
        grace = _PARTED_GRACE_S if self.kind.startswith("partition") else _GRACE_S
        return self.end is None or self.end + grace >= since


class Weather:
    """All troubles until now. Runs on the program's event loop."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.troubles: list[Trouble] = []

    def strikes(self, kind: str, targets: tuple[str, ...]) -> Trouble:
        """One begins; whoever asked ends it."""
        trouble = Trouble(kind, targets, time.monotonic())
        self.troubles.append(trouble)
        return trouble

    def excuses(self, name: str, since: float) -> bool:
        """Whether a connection to ``name`` may have broken that was used from ``since`` on."""
        return any(name in trouble.targets and trouble.felt(since) for trouble in self.troubles)

    def near(self, begin: float, end: float) -> list[str]:
        """What happened around that time, in words."""
        near = [
            trouble
            for trouble in self.troubles
            if trouble.begin <= end and (trouble.end is None or trouble.end >= begin - _NEAR_S)
        ]
        return [self.told(trouble) for trouble in near]

    def told(self, trouble: Trouble) -> str:
        """In seconds since the load began."""
        end = "not over" if trouble.end is None else f"over at {trouble.end - self.began:.1f}"
        return f"{trouble.begin - self.began:.1f}: {trouble.kind} of {' and '.join(trouble.targets)}, {end}"
