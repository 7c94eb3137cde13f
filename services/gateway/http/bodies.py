"""The bytes of all request bodies that a gateway holds, and their bound."""

from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from services.common.errors import TooManyBodies
from services.gateway.http.guard import KEY

# In the scope of a request from outside: its ``HeldBody``.
BODY = "toka.body"
_RETRY_S = 1.0


class HeldBodies:
    """Counts the bytes of request bodies from their receipt to the end of their responses. On one event loop.

    One API key may hold half of ``most`` bytes, and always the largest body.
    """

    def __init__(self, most: int, largest: int) -> None:
        """``most``: bytes of all bodies. ``largest``: bytes of one."""
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

    def change(self, name: str, by: int) -> None:
        """Add ``by`` bytes, which may be negative, to those of the key ``name``."""
        self.bytes += by
        if name:
            self._by_key[name] += by
            self._by_key += Counter()  # forgets keys that hold nothing

    def fits(self, name: str, more: int) -> bool:
        """Return whether the key ``name``, or a caller without one, may hold ``more`` bytes."""
        return self.bytes + more <= self._most and (not name or self._by_key[name] + more <= self._most_of_key)


class HeldBody:
    """The body of one request."""

    def __init__(self, bodies: HeldBodies, name: str) -> None:
        self._bodies, self._name = bodies, name
        self._bytes = 0

    def resize(self, size: int) -> None:
        """Hold ``size`` bytes from now on. Raises ``TooManyBodies`` if there is no room for them."""
        self.check(size)
        self._bodies.change(self._name, size - self._bytes)
        self._bytes = size

    def check(self, size: int) -> None:
        """Raise ``TooManyBodies`` if there is no room for ``size`` bytes."""
        more = size - self._bytes
        if more > 0 and not self._bodies.fits(self._name, more):
            raise TooManyBodies(
                "the server holds as many bytes of requests as it may (max_bodies_bytes=); send the request again"
                " later, or a smaller one",
                retry_after_s=_RETRY_S,
            )
