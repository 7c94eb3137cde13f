"""Limits of an API key: concurrent requests and tokens per minute.

The limits hold for one process. Each of ``toka``'s gateways gets an equal part of them.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest, Overloaded
from services.common.keys import Key

# Reserved for an answer if the request does not limit it. Answers are rarely as long as the context.
DEFAULT_ANSWER_TOKENS = 1024
_BUSY_RETRY_S = 1.0


@dataclass
class _Usage:
    """Usage of one key. ``tokens`` is the level of its bucket, negative after answers longer than reserved."""

    tokens: float
    at: float  # time of the level
    running: int = 0
    background: list[Callable[[], None]] = field(default_factory=list)  # work that yields to requests, newest first
    capacity: asyncio.Event = field(default_factory=asyncio.Event)  # set for a moment when background work may fit


@dataclass
class Reservation:
    """Tokens reserved for a request."""

    limits: "KeyLimits"
    key: Key
    tokens: int

    def settle(self, used: int) -> None:
        """Correct the reservation to ``used`` tokens. It may be called again with a later value."""
        self.limits.take(self.key, used - self.tokens)
        self.tokens = used


class KeyLimits:
    """Limits of all keys. Used on one event loop. Entries are never removed, since keys are few."""

    def __init__(self, gateways: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """Divide the limits by ``gateways``, rounded up. ``clock`` returns seconds."""
        self._gateways = gateways
        self._clock = clock
        self._uses: dict[str, _Usage] = {}

    @contextmanager
    def running(self, key: Key | None, *, admitted: bool = False) -> Iterator[None]:
        """Count a request while it runs. Raises ``Overloaded`` if the key's limit is reached.

        Work that is already ``admitted`` never raises: it continues after the response to its request.
        """
        if key is None:
            yield
            return
        use = self._use(key)
        most = self._part(key.max_concurrent)
        if most is not None and use.running >= most and not admitted:
            raise _exceeded(f"{use.running} requests of this API key are running, which is its limit", _BUSY_RETRY_S)
        use.running += 1
        while most is not None and use.background and use.running + len(use.background) > most:
            use.background.pop()()
        try:
            yield
        finally:
            use.running -= 1
            self.notify_capacity(key.name)

    def start_background(self, key: Key, on_preempted: Callable[[], None]) -> bool:
        """Start background work, such as a line of a batch, if the limit allows it. Return whether it was started.

        It counts until ``end_background``. If a request needs its place, it no longer counts and ``on_preempted`` is
        called.
        """
        use, most = self._use(key), self._part(key.max_concurrent)
        if most is not None and use.running + len(use.background) >= most:
            return False
        use.background.append(on_preempted)
        return True

    def end_background(self, key: Key, on_preempted: Callable[[], None]) -> None:
        """Stop counting background work that ended or was preempted."""
        with suppress(ValueError):
            self._use(key).background.remove(on_preempted)
        self.notify_capacity(key.name)

    async def wait_for_capacity(self, name: str, at_most_s: float) -> None:
        """Wait at most ``at_most_s`` seconds for capacity for background work of the key ``name``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._uses[name].capacity.wait(), at_most_s)

    def notify_capacity(self, name: str) -> None:
        """Wake up the tasks in ``wait_for_capacity``."""
        capacity = self._uses[name].capacity
        capacity.set()
        capacity.clear()

    def reserve(self, key: Key | None, tokens: int, *, field: str = "max_tokens") -> Reservation | None:
        """Reserve ``tokens`` for a request. Return None if the key has no limit.

        Raises ``Overloaded`` if the bucket contains fewer tokens, and ``InvalidRequest`` with ``field`` if it can never
        contain them.
        """
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

    def seconds_until_spare(self, key: Key, tokens: int) -> float:
        """Return the seconds until background work may take ``tokens``. Requests keep half of a minute's tokens.

        Work that needs more than the other half waits until the bucket is full. Raises ``InvalidRequest`` if the bucket
        can never contain ``tokens``.
        """
        rate, use = self._rate(key), self._use(key)
        _check_fits(tokens, rate, "max_tokens")
        return max(0.0, min(tokens + rate / 2, rate) - use.tokens) * 60 / rate

    def take(self, key: Key, tokens: int) -> None:
        """Take ``tokens`` without a check. A negative number returns tokens."""
        rate, use = self._rate(key), self._use(key)
        use.tokens = min(use.tokens - tokens, rate)

    def headers(self, key: Key | None) -> dict[str, str]:
        """Return OpenAI's headers ``x-ratelimit-*``. The limit of requests is that of concurrent requests."""
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

    def _use(self, key: Key) -> _Usage:
        """Return the current usage of ``key``."""
        now, rate = self._clock(), self._part(key.tokens_per_minute)
        use = self._uses.setdefault(key.name, _Usage(math.inf, now))
        use.tokens = math.inf if rate is None else min(use.tokens + (now - use.at) * rate / 60, rate)
        use.at = now
        return use

    def _rate(self, key: Key) -> int:
        """Return the tokens per minute of a key with such a limit."""
        if (rate := self._part(key.tokens_per_minute)) is None:
            raise ValueError(f"key {key.name}: it has no limit of tokens")
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
