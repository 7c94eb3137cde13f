"""Detects files that are replaced while a process runs."""

import time
from collections.abc import Iterable
from pathlib import Path

CHECK_EVERY_S = 1.0

Signature = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Reports changes of a set of files. It reads their status at most once a second.

    The object that caches the files' content owns it and calls it on its own thread.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = [Path(path) for path in paths]
        self._checked_at = time.monotonic()
        self._seen = self._signatures()

    def changed(self) -> bool:
        """Return whether a file changed since the last check. Return False without a check within a second of it."""
        if (now := time.monotonic()) - self._checked_at < CHECK_EVERY_S:
            return False
        self._checked_at = now
        seen, self._seen = self._seen, self._signatures()
        return seen != self._seen

    def _signatures(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return values that differ for each version of the file, or None if its status cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
