"""What the server keeps for its clients, as far as it has told of it."""

from collections import deque
from random import Random

PREFIXES = ("file-", "batch_", "resp_")
_MOST = 200  # of each kind


class Kept:
    """Ids of files, batches and stored responses, and whose they and their contents are."""

    def __init__(self) -> None:
        self._ids: dict[str, deque[str]] = {prefix: deque() for prefix in PREFIXES}
        self._owners: dict[str, str] = {}
        self._marks: dict[bytes, str] = {}

    def sent(self, marks: set[bytes], owner: str) -> None:
        """Contents of ``owner`` that may be kept."""
        self._marks |= dict.fromkeys(marks, owner)

    def note(self, identity: str, owner: str) -> None:
        """There is ``identity``, of ``owner``."""
        ids = next((ids for prefix, ids in self._ids.items() if identity.startswith(prefix)), None)
        if ids is None or identity in self._owners:
            return
        ids.append(identity)
        self._owners[identity] = owner
        if len(ids) > _MOST:
            del self._owners[ids.popleft()]

    def choose(self, random: Random, prefix: str) -> str | None:
        """One of those that begin with ``prefix``."""
        ids = self._ids[prefix]
        return random.choice(ids) if ids else None

    def owner(self, identity: str) -> str | None:
        return self._owners.get(identity)

    def may_see(self, owner: str | None, mark: bytes) -> bool:
        """Whether ``mark`` is in something that ``owner`` has had kept."""
        return mark in self._marks and self._marks[mark] == owner
