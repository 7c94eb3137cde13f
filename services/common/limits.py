"""What a key may use: so many requests at once, and so many tokens a minute. Of one process: nothing is shared, so each
of ``toka``'s gateways has its part of both."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest, Overloaded
from services.common.keys import Key

# Of an answer whose request does not say how long it may be, and which is rarely as long as the context.
UNSAID_TOKENS = 1024
_BUSY_RETRY_S = 1.0


@dataclass
class _Use:
    """A key's. ``tokens``: what is left of its bucket, below 0 when answers took more than was reserved."""

    tokens: float
    at: float  # when that was so
    running: int = 0
    behind: list[Callable[[], None]] = field(default_factory=list)  # what gives way to requests, the last one first
    waiting: list[asyncio.Future[None]] = field(default_factory=list)  # for room behind requests


@dataclass
class Reservation:
    """Tokens that a request may take; ``settle`` says how many it took."""

    limits: "Limits"
    key: Key
    tokens: int

    def settle(self, used: int) -> None:
        """Give back what was not used, or take what more was. The last word counts."""
        self.limits.take(self.key, used - self.tokens)
        self.tokens = used


class Limits:
    """Lives on one event loop. Keys are few, so nothing is forgotten."""

    def __init__(self, gateways: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """``gateways``: a key's limits are divided by so many, rounded up. ``clock``: seconds."""
        self._gateways = gateways
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def running(self, key: Key | None, *, admitted: bool = False) -> Iterator[None]:
        """Count a request while it runs. Raises ``Overloaded`` if the key's limit is reached, unless it is ``admitted``
        already: work that goes on when its request has been answered."""
        if key is None:
            yield
            return
        use = self._use(key)
        most = self._part(key.max_concurrent)
        if most is not None and use.running >= most and not admitted:
            raise _exceeded(f"{use.running} requests of this API key run already, its limit", _BUSY_RETRY_S)
        use.running += 1
        while most is not None and use.behind and use.running + len(use.behind) > most:
            use.behind.pop()()
        try:
            yield
        finally:
            use.running -= 1
            self.tell_room(key.name)

    def begin_behind(self, key: Key, give_way: Callable[[], None]) -> bool:
        """Whether there is room for what is no request itself, such as a line of a batch; it is counted then, until
        ``end_behind``. When a request needs its place it is not counted any more, and ``give_way`` is called."""
        use, most = self._use(key), self._part(key.max_concurrent)
        if most is not None and use.running + len(use.behind) >= most:
            return False
        use.behind.append(give_way)
        return True

    def end_behind(self, key: Key, give_way: Callable[[], None]) -> None:
        """It has ended, or has given way."""
        with suppress(ValueError):
            self._use(key).behind.remove(give_way)
        self.tell_room(key.name)

    async def wait_for_room(self, name: str, at_most_s: float) -> None:
        """Until there may be room behind the requests of the key ``name``, which had none."""
        use, room = self._uses[name], asyncio.get_running_loop().create_future()
        use.waiting.append(room)
        try:
            await asyncio.wait([room], timeout=at_most_s)
        finally:
            if room in use.waiting:
                use.waiting.remove(room)

    def tell_room(self, name: str) -> None:
        """Who waits for it is to look."""
        use = self._uses[name]
        waiting, use.waiting = use.waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    def reserve(self, key: Key | None, tokens: int, *, field: str = "max_tokens") -> Reservation | None:
        """``tokens`` for a request; None: nobody counts. Raises ``Overloaded`` when there are not so many now, and
        ``InvalidRequest``, which names ``field``, when there never will be."""
        if key is None or key.tokens_per_minute is None:
            return None
        rate, use = self._rate(key), self._use(key)
        _check_fits(tokens, rate, field)
        if use.tokens < tokens:
            raise _exceeded(
                f"this API key has {max(0, math.floor(use.tokens))} of its {rate} tokens a minute left, and the"
                f" request may take {tokens}",
                (tokens - use.tokens) * 60 / rate,
            )
        use.tokens -= tokens
        return Reservation(self, key, tokens)

    def spare_in_s(self, key: Key, tokens: int) -> float:
        """Seconds until ``tokens`` can be had and half of a minute's are left for requests; of what needs more than
        the other half, until the bucket is full. Raises as ``reserve`` when there never will be so many."""
        rate, use = self._rate(key), self._use(key)
        _check_fits(tokens, rate, "max_tokens")
        return max(0.0, min(tokens + rate / 2, rate) - use.tokens) * 60 / rate

    def take(self, key: Key, tokens: int) -> None:
        """``tokens`` more than were reserved; negative: fewer."""
        rate, use = self._rate(key), self._use(key)
        use.tokens = min(use.tokens - tokens, rate)

    def headers(self, key: Key | None) -> dict[str, str]:
        """``x-ratelimit-*`` as OpenAI has them; ``requests`` are those at once."""
        headers: dict[str, str] = {}
        if key is None:
            return headers
        use = self._use(key)
        if (most := self._part(key.max_concurrent)) is not None:
            headers["x-ratelimit-limit-requests"] = str(most)
            headers["x-ratelimit-remaining-requests"] = str(max(0, most - use.running))
        if (rate := self._part(key.tokens_per_minute)) is not None:
            headers["x-ratelimit-limit-tokens"] = str(rate)
            headers["x-ratelimit-remaining-tokens"] = str(max(0, math.floor(use.tokens)))
            headers["x-ratelimit-reset-tokens"] = f"{(rate - use.tokens) * 60 / rate:.3f}s"
        return headers

    def _use(self, key: Key) -> _Use:
        """Up to date."""
        now, rate = self._clock(), self._part(key.tokens_per_minute)
        use = self._uses.setdefault(key.name, _Use(math.inf, now))
        use.tokens = math.inf if rate is None else min(use.tokens + (now - use.at) * rate / 60, rate)
        use.at = now
        return use

    def _rate(self, key: Key) -> int:
        """Tokens a minute of a key that has such a limit."""
        if (rate := self._part(key.tokens_per_minute)) is None:
            raise ValueError(f"key {key.name}: nobody counts its tokens")
        return rate

    def _part(self, limit: int | None) -> int | None:
        return None if limit is None else -(-limit // self._gateways)


def _check_fits(tokens: int, rate: int, field: str) -> None:
    if tokens > rate:
        raise InvalidRequest(
            f"prompt and max_tokens are {tokens} tokens together, and this API key has {rate} a minute here; ask"
            " for less at once",
            field=field,
            reason="RATE_LIMIT_EXCEEDED",
        )


def _exceeded(message: str, retry_after_s: float) -> Overloaded:
    return Overloaded(f"{message}; try again later", retry_after_s=retry_after_s, reason="RATE_LIMIT_EXCEEDED")
