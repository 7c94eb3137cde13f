"""Files that may be replaced while a process runs."""

import time
from collections.abc import Iterable
from pathlib import Path

LOOK_EVERY_S = 1.0

Signature = tuple[tuple[int, int, int] | None, ...]


class Watched:
    """Says whether some files changed, and looks at most once a second. Owned by what was read from them, and asked by
    whatever thread that belongs to."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = [Path(path) for path in paths]
        self._looked_at = time.monotonic()
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether they are others than when this last said so."""
        if (now := time.monotonic()) - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Changes with the file; None: it is not there, or cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
