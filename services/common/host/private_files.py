"""Files that only this user can read: prompts and answers are in the store, in recordings and on sockets."""

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

OTHERS = 0o077  # all permissions of the group and of others
WRITING = 0o022  # those to write
_given: int | None = None  # the umask that this process was started with, once it keeps its files private


def keep_files_private() -> None:
    """Create every file, directory and socket of this process and its children without permissions for other users."""
    global _given
    if _given is None:
        _given = os.umask(OTHERS)


@contextlib.contextmanager
def usual_permissions() -> Iterator[None]:
    """Create files as the user's umask says, for what other programs share, such as the cache of downloaded models.

    A umask belongs to the process. Other threads must create no files meanwhile.
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
    """Return the umask to start children with that call ``keep_files_private`` themselves; -1 = the own one."""
    return -1 if _given is None else _given


def warn_if_shared(what: str, paths: Iterable[Path], permissions: int = OTHERS) -> None:
    """Log a warning if other users of this host have ``permissions`` for ``paths``, which contain ``what``.

    Paths that do not exist, belong to another user, or are in a directory that other users cannot enter do not count.
    Files of earlier versions have such permissions.
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
