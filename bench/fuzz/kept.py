"""The objects that the server stores for its clients."""

from collections import deque
from random import Random

PREFIXES = ("file-", "batch_", "resp_")
_MOST = 200  # ids of each kind


class Kept:
    """The ids of files, batches and stored responses, with the owners of the objects and their contents."""

    def __init__(self) -> None:
        self._ids: dict[str, deque[str]] = {prefix: deque() for prefix in PREFIXES}
        self._owners: dict[str, str] = {}
        self._marks: dict[bytes, str] = {}

    def sent(self, marks: set[bytes], owner: str) -> None:
        """Record the marks of contents that ``owner`` has sent."""
        self._marks |= dict.fromkeys(marks, owner)

    def note(self, identity: str, owner: str) -> None:
        """Record the object ``identity`` of ``owner``."""
        ids = next((ids for prefix, ids in self._ids.items() if identity.startswith(prefix)), None)
        if ids is None or identity in self._owners:
            return
        ids.append(identity)
        self._owners[identity] = owner
        if len(ids) > _MOST:
            del self._owners[ids.popleft()]

    def choose(self, random: Random, prefix: str) -> str | None:
        """Return a random id that begins with ``prefix``, or None."""
        ids = self._ids[prefix]
        return random.choice(ids) if ids else None

    def owner(self, identity: str) -> str | None:
        return self._owners.get(identity)

    def may_see(self, owner: str | None, mark: bytes) -> bool:
        """Return whether ``owner`` has sent a content with ``mark`` that the server may store."""
        return mark in self._marks and self._marks[mark] == owner
