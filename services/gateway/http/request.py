"""What every endpoint does with HTTP itself: read a bounded body, know the caller, stop when the client has gone."""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, MutableMapping
from typing import Any, NamedTuple, TypeVar

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from services.common.errors import PayloadTooLarge, TokaError, TooManyBodies, UnsupportedMediaType
from services.common.json_scan import Raw
from services.common.keys import Key, salted
from services.common.process.tracing import HEADER
from services.gateway.engine.tracing import REQUEST_ID, TRACEPARENT
from services.gateway.http.bodies import BODY, HeldBody
from services.gateway.http.guard import KEY, presented_key
from services.gateway.http.idempotency import read_idempotency_key, seed_of_retries
from services.gateway.http.lines import Line

log = structlog.get_logger(__name__)

# A client that is still sending may not look for the answer: so much more is read and thrown away first.
_DISCARD_FACTOR = 4
_COPIED_BYTES = 64 * 1024  # of a body; a larger one is not copied once more

_JSON_TYPE = re.compile(r"application/([a-z0-9!#$&^_.+-]+\+)?json")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_FAIRNESS_KEY_DIGITS = 16
# In the scope of a request: the id that its client gave it, of visible ASCII characters.
_CLIENT_REQUEST_ID = "toka.client_request_id"
_CLIENT_ID = re.compile(r"[!-~]{1,128}")
_ID_PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl", "/v1/responses": "resp"}

R = TypeVar("R")


class Posted(NamedTuple):
    """The body of a request: JSON text, or a value that was parsed from a text of ``size`` bytes."""

    raw: Raw = b""
    document: Any = None
    size: int = 0  # 0: there is no document

    @property
    def bytes(self) -> int:
        """Size of the body, by which work on it goes to a thread or not."""
        return self.size or len(self.raw)


async def read_body(request: Request, limit: int) -> Raw:
    """Return the JSON body of a request, of at most ``limit`` bytes, whether announced or sent in chunks.

    Raises ``UnsupportedMediaType`` if the request does not say that its body is JSON, ``PayloadTooLarge``,
    ``TooManyBodies`` if the gateway has no room for it, and ``ClientDisconnect`` if the client left before its end. The
    type matters to browsers: they send other types across origins without asking first.
    """
    kind = request.headers.get("content-type", "")
    if not _JSON_TYPE.fullmatch(kind.partition(";")[0].strip().lower()):
        given = f"not {kind[:100]!r}" if kind else "and this request has no content type"
        raise UnsupportedMediaType(f"the body must be JSON, {given}; send the header 'Content-Type: application/json'")
    announced = int(request.headers.get("content-length", 0))
    held: HeldBody | None = request.scope.get(BODY)
    refusal: TokaError | None = _too_large(limit) if announced > limit else None
    try:
        if held is not None and refusal is None:
            held.check(announced)
    except TooManyBodies as error:
        refusal = error
    if refusal is not None and "expect" in request.headers:  # the client sends its body after "100 Continue"
        raise refusal
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            refusal = _too_large(limit)
        elif refusal is None and held is not None:
            refusal = _no_room(held, size)
        if refusal is None:
            body += part
        elif body:
            body = bytearray()
            if held is not None:
                held.resize(0)
        if size > limit * _DISCARD_FACTOR:
            break
    if refusal is not None:
        raise refusal
    return body if len(body) > _COPIED_BYTES else bytes(body)


def _no_room(held: HeldBody, size: int) -> TokaError | None:
    """Count ``size`` bytes as held. Return the error if there is no room for them."""
    try:
        held.resize(size)
    except TooManyBodies as error:
        return error
    return None


def name_request(scope: MutableMapping[str, Any]) -> str:
    """Return the id of a request, a new one at the first call.

    It is in the request's answer, at schedulers, and in the log lines that this task writes from now on. Those lines
    also have the ``client_request_id`` that the request's header ``x-request-id`` gives, if there is one.
    """
    if (known := scope.get(REQUEST_ID)) is None:
        prefix = _ID_PREFIXES.get(scope["path"], "req")
        known = scope[REQUEST_ID] = f"{prefix}-{secrets.token_hex(16)}"
        structlog.contextvars.bind_contextvars(request_id=known)
        if theirs := _client_id(scope):
            scope[_CLIENT_REQUEST_ID] = theirs
            structlog.contextvars.bind_contextvars(client_request_id=theirs)
            log.info("request with an id of its client")
    return known


def id_in_header(scope: MutableMapping[str, Any]) -> str:
    """Return the value of ``x-request-id`` in the answer: the client's own id if it sent one, else ``name_request``."""
    known = name_request(scope)
    theirs: str = scope.get(_CLIENT_REQUEST_ID, known)
    return theirs


def _client_id(scope: MutableMapping[str, Any]) -> str:
    """Return the request's ``x-request-id``, or an empty string if it is missing or malformed."""
    for name, value in scope.get("headers", ()):
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if _CLIENT_ID.fullmatch(text) else ""
    return ""


class Caller(NamedTuple):
    """What a request's headers say about who sent it, and when that was."""

    traceparent: str  # W3C trace context (Trace Context level 1, section 3.2); empty when none or malformed
    fairness_key: str  # of the API key; empty without one
    owner: str = ""  # the key's name: whose files, batches and stored responses are meant; empty without keys
    key: Key | None = None  # whose limits count
    isolated: bool = False  # from the cached prefixes of other owners
    idempotency_key: str = ""  # empty without one
    retry_seed: int | None = None  # of answers without a seed, where a request may be sent again
    asked_at: float | None = None  # seconds of the monotonic clock; None: now
    line: Line | None = None  # of a batch, which waits where a request is refused
    request_id: str = ""
    started_at: float = 0.0  # when the gateway began to read the request, by ``time.perf_counter``

    def cache_salt(self, asked: str) -> str:
        """What stands for the salt that was ``asked`` for."""
        return salted(self.owner, asked) if self.isolated else asked

    def deadline_ms(self, timeout_s: float | None) -> int | None:
        """Return the end of ``timeout_s`` in milliseconds of the monotonic clock. None: the request has no deadline."""
        asked_at = time.monotonic() if self.asked_at is None else self.asked_at
        return None if timeout_s is None else int((asked_at + timeout_s) * 1000)


def read_caller(request: Request, body: Raw = b"", started_at: float = 0.0) -> Caller:
    """Return the caller of ``request``, with the name of its API key, or with a digest of the key if the server has no
    keys. Raises InvalidRequest for a malformed idempotency key."""
    request_id = name_request(request.scope)
    trace = request.scope.get(TRACEPARENT) or request.headers.get(HEADER, "")
    trace = trace if _TRACEPARENT.fullmatch(trace) else ""
    key: Key | None = request.scope.get(KEY)
    owner = "" if key is None else key.name
    again = read_idempotency_key(request.headers)
    return Caller(
        trace,
        owner or _digest(request),
        owner,
        key,
        key is not None and request.app.state.gateway.guard.isolates,
        again,
        seed_of_retries(owner, again, request.scope["path"], body) if again else None,
        time.monotonic(),
        request_id=request_id,
        started_at=started_at,
    )


def _digest(request: Request) -> str:
    api_key = presented_key(request.scope)
    return hashlib.sha256(api_key.encode("latin-1")).hexdigest()[:_FAIRNESS_KEY_DIGITS] if api_key else ""


async def while_connected(receive: Receive, work: Awaitable[R]) -> R:
    """The result of ``work``, which is cancelled when the client goes away: ``ClientDisconnect`` then.

    The request's body must have been read. ``work`` runs in the calling task: a second one only watches the client.
    """
    task = asyncio.current_task()
    assert task is not None  # this is a coroutine
    left = over = False

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
