"""What every endpoint does with HTTP itself: read a bounded body, know the caller, stop when the client has gone."""

import asyncio
import hashlib
import re
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from services.common.errors import PayloadTooLarge

# A client that is still sending may not look for the answer: so much more is read and thrown away first.
_DISCARD_FACTOR = 4

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_FAIRNESS_KEY_DIGITS = 16
# In the scope of a request that comes from within: its ``Caller``, there being no headers that say it.
CALLER = "toka.caller"

R = TypeVar("R")


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body, of at most ``limit`` bytes, whether announced or sent in chunks.

    Raises ``PayloadTooLarge``, or ``ClientDisconnect`` when the client left before its end.
    """
    announced = int(request.headers.get("content-length", 0))
    if announced > limit and "expect" in request.headers:  # it waits for our word before it sends
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        if size > limit * _DISCARD_FACTOR:
            break
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


class Caller(NamedTuple):
    """What a request's headers say about who sent it."""

    traceparent: str  # W3C trace context (Trace Context level 1, section 3.2); empty when none or malformed
    fairness_key: str  # of the API key; empty without one


def read_caller(request: Request) -> Caller:
    """Who sent ``request``. The API key itself goes no further: a digest of it tells callers apart as well."""
    if (known := request.scope.get(CALLER)) is not None:
        return known
    trace = request.headers.get("traceparent", "")
    scheme, _, api_key = request.headers.get("authorization", "").partition(" ")
    api_key = api_key.strip() if scheme.lower() == "bearer" else ""
    digest = hashlib.sha256(api_key.encode("latin-1")).hexdigest()[:_FAIRNESS_KEY_DIGITS] if api_key else ""
    return Caller(trace if _TRACEPARENT.fullmatch(trace) else "", digest)


async def while_connected(receive: Receive, work: Awaitable[R]) -> R:
    """The result of ``work``, which is cancelled when the client goes away: ``ClientDisconnect`` then.

    The request's body must have been read. ``work`` runs in the calling task: a second one only watches the client.
    """
    task, left, over = asyncio.current_task(), False, False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        if not over:
            left = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        over = True
        watcher.cancel()


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request's body is larger than {limit} bytes; split it, or raise max_body_bytes=")
