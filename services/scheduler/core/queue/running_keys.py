"""Numbers for the fairness keys of running sequences, so that arrays over slots can hold them."""

from collections.abc import ItemsView


class RunningKeys:
    """Small numbers for keys. A number is reused when no sequence of its key runs. Owned by the core."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._users: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return the number of keys with running sequences."""
        return len(self._numbers)

    @property
    def only(self) -> str | None:
        """The key of all running sequences; None if there are several, or none."""
        return next(iter(self._numbers)) if len(self._numbers) == 1 else None

    @property
    def size(self) -> int:
        """A bound on the numbers in use, which are from 0 to ``size`` - 1."""
        return len(self._users)

    def acquire(self, key: str, users: int) -> int:
        """Return the number of ``key``, for ``users`` more sequences."""
        number = self._numbers.get(key)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = len(self._users)
                self._users.append(0)
            self._numbers[key] = number
        self._users[number] += users
        return number

    def release(self, key: str) -> None:
        """Remove one sequence of ``key``."""
        number = self._numbers[key]
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[key]
            self._free.append(number)

    def number(self, key: str) -> int | None:
        """Return the number of ``key``, or None if no sequence of it runs."""
        return self._numbers.get(key)

    def items(self) -> ItemsView[str, int]:
        """Return the keys with running sequences, and their numbers."""
        return self._numbers.items()

    def running(self, key: str) -> int:
        """Return how many sequences of ``key`` run."""
        number = self._numbers.get(key)
        return 0 if number is None else self._users[number]
