"""Bounded queue of the events to send on one stream. Events are merged when the client is slow."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from services.common.errors import Overloaded, TokaError
from services.common.plan.routed_experts import RoutedExperts
from services.common.plan.top_logprobs import TopLogprobs
from services.scheduler.core.output import Delta
from services.scheduler.core.plan import NO_FLOATS
from services.scheduler.engine.events import Accepted
from tokasaurus.scheduler.v1 import observe_pb2

_MOST_BYTES = 64 * 1024 * 1024  # a client with more unsent bytes is disconnected
_MOST_ACCEPTANCES = 256  # in one message
_MESSAGE_BYTES = 1024 * 1024  # limit of merging (a client's default receive limit is 4 MiB)


def merged(deltas: list[Delta]) -> Delta:
    """Return the output of ``deltas``, which are of one sink, of the same weights and in order, as one delta."""
    if len(deltas) == 1:
        return deltas[0]
    of_token = np.concatenate([delta.handles for delta in deltas])
    order = np.argsort(of_token, kind="stable")
    starts = np.flatnonzero(np.diff(of_token[order], prepend=-1))
    logprobs = _join_logprobs(deltas)
    top = TopLogprobs.join([delta.top for delta in deltas], [len(delta.tokens) for delta in deltas])
    return Delta(
        deltas[-1].step,
        of_token[order[starts]],
        np.concatenate([delta.tokens for delta in deltas])[order],
        logprobs[order] if len(logprobs) else logprobs,
        None if top is None else top[order],
        np.diff(starts, append=len(order)),
        finished=[finish for delta in deltas for finish in delta.finished],
        scored=[scored for delta in deltas for scored in delta.scored],
        routed=RoutedExperts.join([delta.routed for delta in deltas]),
        weights_version=deltas[0].weights_version,
    )


class Mailbox:
    """Queue of one stream, filled by ``put`` and read by one reader, both on the event loop.

    ``overflowed`` is called once when the reader is too slow, because the reader may be blocked in a write.
    """

    def __init__(self, overflowed: Callable[[], object] = lambda: None, most_bytes: int | None = None) -> None:
        self.tokens = 0  # number of tokens ever put
        self.joins_acceptances = False  # ``get`` may return several acceptances as one item
        self._items: deque[Any] = deque()
        self._load: observe_pb2.Load | None = None  # only the newest is sent
        self._bytes = 0
        self._most_bytes = most_bytes or _MOST_BYTES
        self._on_overflow = overflowed
        self._available = asyncio.Event()
        self._overflowed = False
        self._closed = False
        self._error: TokaError | None = None

    def put(self, item: Any) -> None:
        """Append ``item``, a ``Delta`` or another event."""
        if self._overflowed:
            return
        self._items.append(item)
        self._bytes += _size(item)
        if isinstance(item, Delta):
            self.tokens += len(item.tokens)
        if self._bytes > self._most_bytes:
            self._overflowed = True
            self._items.clear()
            self._on_overflow()
        self._available.set()

    def put_load(self, load: observe_pb2.Load) -> None:
        self._load = load
        self._available.set()

    def close(self, error: TokaError | None = None) -> None:
        """Accept no more items. When all are read, ``get`` returns None, or raises ``error``."""
        self._closed, self._error = True, self._error or error
        self._available.set()

    async def get(self) -> Any:
        """Return the next item. Raises ``Overloaded`` if the reader was too slow.

        Consecutive deltas of the same weights are merged. With ``joins_acceptances``, consecutive acceptances are
        returned as a list.
        """
        while True:
            if self._overflowed:
                raise Overloaded(
                    "the client reads too slowly: more than"
                    f" {self._most_bytes} bytes wait to be sent; read faster, or request less at once",
                    retry_after_s=1.0,
                    reason="SLOW_READER",
                )
            if self._items:
                return self._next()
            if self._load is not None:
                load, self._load = self._load, None
                return load
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._available.clear()
            await self._available.wait()

    def _next(self) -> Any:
        item = self._items.popleft()
        taken = _size(item)
        if isinstance(item, Delta):
            deltas = [item]
            while self._items and _joins(item, self._items[0]) and taken < _MESSAGE_BYTES:
                deltas.append(self._items.popleft())
                taken += _size(deltas[-1])
            item = merged(deltas)
        elif isinstance(item, Accepted) and self.joins_acceptances:
            accepted = [item]
            while self._items and isinstance(self._items[0], Accepted) and len(accepted) < _MOST_ACCEPTANCES:
                accepted.append(self._items.popleft())
                taken += _size(accepted[-1])
            item = accepted if len(accepted) > 1 else item
        self._bytes -= taken
        return item


def _joins(delta: Delta, following: Any) -> bool:
    """Return whether ``following`` can be sent in one message with ``delta``."""
    return isinstance(following, Delta) and following.weights_version == delta.weights_version


def _size(item: Any) -> int:
    """Return the approximate size of the encoded item, in bytes."""
    if not isinstance(item, Delta):
        return 64
    tokens = len(item.tokens)
    scored = sum(8 * len(scored.logprobs) + 8 * len(scored.top.logprobs) for _, scored in item.scored)
    scored += 0 if item.routed is None else item.routed.experts.size + 12 * len(item.routed.owners)
    listed = 0 if item.top is None else len(item.top.token_ids)
    return scored + 64 + 8 * tokens + 4 * len(item.logprobs) + 8 * listed + 64 * len(item.finished)


def _join_logprobs(deltas: list[Delta]) -> np.ndarray:
    """Return the log-probabilities of all tokens, NaN in a delta that has none; empty if no delta has any."""
    if not any(len(delta.logprobs) for delta in deltas):
        return NO_FLOATS
    missing = np.float32(np.nan)
    return np.concatenate(
        [delta.logprobs if len(delta.logprobs) else np.full(len(delta.tokens), missing) for delta in deltas]
    )
