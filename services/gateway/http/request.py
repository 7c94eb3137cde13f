"""HTTP functions that all endpoints share: read a body, identify the caller, cancel on disconnect."""

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

from services.common.errors import PayloadTooLarge, TokaError, UnsupportedMediaType
from services.common.json_scan import Raw
from services.common.keys import Key, salted
from services.common.process.tracing import HEADER
from services.gateway.engine.tracing import REQUEST_ID, TRACEPARENT
from services.gateway.http.bodies import BODY, HeldBody
from services.gateway.http.guard import KEY, presented_key
from services.gateway.http.idempotency import read_idempotency_key, seed_of_retries
from services.gateway.http.lines import Line

log = structlog.get_logger(__name__)

# A client may read the error only after it has sent its body. So this multiple of the limit is read and discarded.
_DISCARD_FACTOR = 4
_COPIED_BYTES = 64 * 1024  # a larger body is not copied to ``bytes``

_JSON_TYPE = re.compile(r"application/([a-z0-9!#$&^_.+-]+\+)?json")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_FAIRNESS_KEY_DIGITS = 16
# Scope key: the request id that the client gave, of visible ASCII characters.
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
    """Return the JSON body of a request, of at most ``limit`` bytes.

    Raises ``UnsupportedMediaType`` if the content type is not JSON, ``PayloadTooLarge``, ``TooManyBodies`` if the
    gateway has no memory for it, and ``ClientDisconnect`` if the client disconnects. The content type is checked
    because browsers send other types across origins without a preflight request.
    """
    kind = request.headers.get("content-type", "")
    if not _JSON_TYPE.fullmatch(kind.partition(";")[0].strip().lower()):
        given = f"not {kind[:100]!r}" if kind else "and this request has no content type"
        raise UnsupportedMediaType(f"the body must be JSON, {given}; send the header 'Content-Type: application/json'")
    announced = int(request.headers.get("content-length", 0))
    held: HeldBody | None = request.scope.get(BODY)
    refusal: TokaError | None = _too_large(limit) if announced > limit else None
    if held is not None and refusal is None:
        refusal = held.refusal(announced)
    if refusal is not None and "expect" in request.headers:  # the client sends its body after "100 Continue"
        raise refusal
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            refusal = _too_large(limit)
        elif refusal is None and held is not None:
            refusal = held.resize(size)
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


def name_request(scope: MutableMapping[str, Any]) -> str:
    """Return the id of a request, a new one at the first call.

    The id is sent in the response and to schedulers, and is added to further log lines of this task. Those lines also
    have the ``client_request_id`` from the header ``x-request-id``, if the request has one.
    """
    if (known := scope.get(REQUEST_ID)) is None:
        prefix = _ID_PREFIXES.get(scope["path"], "req")
        known = scope[REQUEST_ID] = f"{prefix}-{secrets.token_hex(16)}"
        structlog.contextvars.bind_contextvars(request_id=known)
        if client_id := _client_id(scope):
            scope[_CLIENT_REQUEST_ID] = client_id
            structlog.contextvars.bind_contextvars(client_request_id=client_id)
            log.info("request with an id of its client")
    return known


def id_in_header(scope: MutableMapping[str, Any]) -> str:
    """Return the ``x-request-id`` of the response: the client's id if it sent one, else that of ``name_request``."""
    known = name_request(scope)
    client_id: str = scope.get(_CLIENT_REQUEST_ID, known)
    return client_id


def _client_id(scope: MutableMapping[str, Any]) -> str:
    """Return the request's ``x-request-id``, or an empty string if it is missing or malformed."""
    for name, value in scope.get("headers", ()):
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if _CLIENT_ID.fullmatch(text) else ""
    return ""


class Caller(NamedTuple):
    """The sender of a request, as its headers show, and the time of the request."""

    traceparent: str  # W3C trace context (Trace Context level 1, section 3.2); empty when none or malformed
    fairness_key: str  # from the API key; empty without a key
    owner: str = ""  # name of the key, which owns files, Batch jobs and stored responses; empty without keys
    key: Key | None = None  # its limits apply
    isolated: bool = False  # does not share cached prefixes with other owners
    idempotency_key: str = ""  # empty if the request has none
    retry_seed: int | None = None  # seed for a request with an idempotency key and without a seed
    asked_at: float | None = None  # seconds of the monotonic clock; None: now
    line: Line | None = None  # of a Batch job, which waits where a request is rejected
    request_id: str = ""  # id of the current request
    started_at: float = 0.0  # when the gateway began to read the request, by ``time.perf_counter``

    def cache_salt(self, asked: str) -> str:
        """Return the cache salt to use for the requested salt ``asked``."""
        return salted(self.owner, asked) if self.isolated else asked

    def deadline_ms(self, timeout_s: float | None) -> int | None:
        """Return the end of ``timeout_s`` in milliseconds of the monotonic clock. None: the request has no deadline."""
        asked_at = time.monotonic() if self.asked_at is None else self.asked_at
        return None if timeout_s is None else int((asked_at + timeout_s) * 1000)


def read_caller(request: Request, body: Raw = b"", started_at: float = 0.0) -> Caller:
    """Return the sender of ``request``. Raises ``InvalidRequest`` for a malformed idempotency key.

    The API key itself is not passed on. Callers are identified by its name, or by a digest if authentication is off.
    """
    request_id = name_request(request.scope)
    trace = request.scope.get(TRACEPARENT) or request.headers.get(HEADER, "")
    trace = trace if _TRACEPARENT.fullmatch(trace) else ""
    key: Key | None = request.scope.get(KEY)
    owner = "" if key is None else key.name
    idempotency_key = read_idempotency_key(request.headers)
    return Caller(
        trace,
        owner or _digest(request),
        owner,
        key,
        key is not None and request.app.state.gateway.guard.isolates,
        idempotency_key,
        seed_of_retries(owner, idempotency_key, request.scope["path"], body) if idempotency_key else None,
        time.monotonic(),
        request_id=request_id,
        started_at=started_at,
    )


def _digest(request: Request) -> str:
    api_key = presented_key(request.scope)
    return hashlib.sha256(api_key.encode("latin-1")).hexdigest()[:_FAIRNESS_KEY_DIGITS] if api_key else ""


async def while_connected(receive: Receive, work: Awaitable[R]) -> R:
    """Return the result of ``work``. Cancel it and raise ``ClientDisconnect`` if the client disconnects.

    The request's body must have been read. ``work`` runs in the calling task. A second task watches the client.
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
