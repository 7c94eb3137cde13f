"""Small numbers for hashable keys, so that arrays over slots can hold them."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Numbering(Generic[K]):
    """Numbers of the keys that have users. The number of a key without users is reused. Owned by the core."""

    def __init__(self) -> None:
        self.numbers: dict[K, int] = {}  # by key; callers only read it
        self._users: list[int] = []
        self._free: list[int] = []

    @property
    def only(self) -> K | None:
        """The only key, or None if there are several or none."""
        return next(iter(self.numbers)) if len(self.numbers) == 1 else None

    @property
    def size(self) -> int:
        """A bound on the numbers in use, which are from 0 to ``size`` - 1."""
        return len(self._users)

    def acquire(self, key: K, users: int) -> int:
        """Add ``users`` users of ``key``. Return its number."""
        number = self.numbers.get(key)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = len(self._users)
                self._users.append(0)
            self.numbers[key] = number
        self._users[number] += users
        return number

    def release(self, key: K) -> int | None:
        """Remove one user of ``key``. Return the number of the key if this was the last user."""
        number = self.numbers[key]
        self._users[number] -= 1
        if self._users[number]:
            return None
        del self.numbers[key]
        self._free.append(number)
        return number

    def users(self, key: K) -> int:
        """Return the number of users of ``key``."""
        number = self.numbers.get(key)
        return 0 if number is None else self._users[number]
