"""Parts of what is too much to be dealt with at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """``items`` in order, so many together as have ``most`` in all, one at least."""
    some: list[T] = []
    size = 0
    for item in items:
        own = size_of(item)
        if some and size + own > most:
            yield some
            some, size = [], 0
        some.append(item)
        size += own
    if some:
        yield some
