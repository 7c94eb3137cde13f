"""Keeps files that hold prompts and answers private to this user: the store, recordings and sockets."""

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

OTHERS = 0o077  # all permissions of the group and of other users
WRITING = 0o022  # write permission of the group and of other users
_given: int | None = None  # the umask at the start of this process; None until ``keep_files_private`` is called


def keep_files_private() -> None:
    """Create every file, directory and socket of this process and its children without permissions for other users."""
    global _given
    if _given is None:
        _given = os.umask(OTHERS)


@contextlib.contextmanager
def usual_permissions() -> Iterator[None]:
    """Create files with the user's own umask, for data shared with other programs such as the model cache.

    A umask belongs to the process, so other threads must not create files meanwhile.
    """
    if _given is None:
        yield
        return
    os.umask(_given)
    try:
        yield
    finally:
        os.umask(OTHERS)


def usual_umask() -> int:
    """Return the umask for children that call ``keep_files_private`` themselves. -1 keeps this process's umask."""
    return -1 if _given is None else _given


def warn_if_shared(what: str, paths: Iterable[Path], permissions: int = OTHERS) -> None:
    """Log a warning if other users of this host have ``permissions`` for ``paths``, which contain ``what``.

    Earlier versions created files with such permissions. Ignores paths that do not exist, belong to another user, or
    are in a directory that other users cannot enter.
    """
    if loose := [path for path in paths if _is_loose(path, permissions)]:
        change = "go-w" if permissions == WRITING else "go="
        log.warning(
            f"other users of this host have permissions for {what}: take them away",
            fix=shlex.join(["chmod", change, *map(str, loose)]),
        )


def _is_loose(path: Path, permissions: int) -> bool:
    try:
        found, parent = path.stat(), path.parent.stat()
    except OSError:
        return False
    return bool(found.st_uid == os.geteuid() and found.st_mode & permissions and parent.st_mode & OTHERS)
