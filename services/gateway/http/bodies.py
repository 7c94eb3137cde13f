"""Limit of the memory that request bodies use."""

from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from services.common.errors import TooManyBodies
from services.gateway.http.guard import KEY

# Scope key of a request from a client: its ``HeldBody``.
BODY = "toka.body"
_RETRY_S = 1.0


class HeldBodies:
    """Counts the bytes of request bodies from their receipt to the end of their responses. Runs on the event loop.

    An API key may use half of ``most`` bytes, or the size of the largest body if that is more.
    """

    def __init__(self, most: int, largest: int) -> None:
        """Limit all bodies to ``most`` bytes. ``largest`` is the limit of a single body."""
        self._most, self._most_of_key = most, max(most // 2, largest)
        self.bytes = 0
        self._by_key: Counter[str] = Counter()

    @contextmanager
    def holding(self, scope: MutableMapping[str, Any]) -> Iterator[None]:
        """Count the body of the request ``scope`` until the context ends."""
        key = scope.get(KEY)
        body = scope[BODY] = HeldBody(self, "" if key is None else key.name)
        try:
            yield
        finally:
            body.resize(0)

    def fits(self, name: str, more: int) -> bool:
        """Return whether the key ``name``, or a caller without a key, may use ``more`` bytes."""
        return self.bytes + more <= self._most and (not name or self._by_key[name] + more <= self._most_of_key)

    def change(self, name: str, by: int) -> None:
        """Add ``by`` bytes, which may be negative, to those of the key ``name``."""
        self.bytes += by
        if name:
            self._by_key[name] += by
            self._by_key += Counter()  # removes keys with zero bytes


class HeldBody:
    """The body of one request."""

    def __init__(self, bodies: HeldBodies, name: str) -> None:
        self._bodies, self._name = bodies, name
        self._bytes = 0

    def resize(self, size: int) -> TooManyBodies | None:
        """Change the counted size to ``size`` bytes, unless that exceeds the limit. Return the error if it does."""
        if (refusal := self.refusal(size)) is None:
            self._bodies.change(self._name, size - self._bytes)
            self._bytes = size
        return refusal

    def refusal(self, size: int) -> TooManyBodies | None:
        """Return the error for a body of ``size`` bytes, or None if the limit allows it."""
        more = size - self._bytes
        if more <= 0 or self._bodies.fits(self._name, more):
            return None
        return TooManyBodies(
            "request bodies use all the memory that max_bodies_bytes= allows; send the request again later, or a"
            " smaller one",
            retry_after_s=_RETRY_S,
        )
