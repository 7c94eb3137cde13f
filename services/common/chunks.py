"""Splits work into chunks of limited size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def chunks_by_size(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items in order, in chunks of a total size of at most ``most``, but of at least one item."""
    chunk: list[T] = []
    size = 0
    for item in items:
        own = size_of(item)
        if chunk and size + own > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += own
    if chunk:
        yield chunk
