"""OpenAI's JSON and HTTP status of errors: ``{"error": {"message", "type", "param", "code"}}``."""

import math
from typing import Any, NamedTuple

import orjson
from fastapi import Response

from services.common import errors

# Field paths of the scheduler's contract, and the request parameters that they come from.
_PARAMETERS = {
    "sampling.logit_bias_token_ids": "logit_bias",
    "sampling.logit_bias_values": "logit_bias",
    "sampling.thinking": "thinking_token_budget",
    "sampling.thinking.tokens": "thinking_token_budget",
    "sampling.thinking.end_token_id": "thinking_token_budget",
    "sampling.thinking.begin_token_id": "thinking_token_budget",
    "output.special_tokens": "skip_special_tokens",
    "directory": "model_path",
    "version": "weight_version",
    "header.version": "weight_version",
    # Parts of an upload, which is the body. The message names the tensor.
    **dict.fromkeys(("header.tensors", "chunk.name", "chunk.offset"), ""),
    "stopping.strings": "stop",
    "stopping.token_ids": "stop_token_ids",
    "tokens.token_ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
}
_PREFIXES = ("sampling.", "stopping.", "output.")


class _Kind(NamedTuple):
    status: int
    type: str


# The first match counts, so subclasses come before their bases.
_KINDS: tuple[tuple[type[errors.TokaError], _Kind], ...] = (
    (errors.PayloadTooLarge, _Kind(413, "invalid_request_error")),
    (errors.UnsupportedMediaType, _Kind(415, "invalid_request_error")),
    (errors.ReusedIdempotencyKey, _Kind(422, "invalid_request_error")),
    (errors.InvalidRequest, _Kind(400, "invalid_request_error")),
    (errors.Unauthenticated, _Kind(401, "authentication_error")),
    (errors.PermissionDenied, _Kind(403, "permission_error")),
    (errors.NotFound, _Kind(404, "invalid_request_error")),
    (errors.AlreadyExists, _Kind(409, "invalid_request_error")),
    (errors.FailedPrecondition, _Kind(409, "invalid_request_error")),
    (errors.TooManyBodies, _Kind(503, "service_unavailable_error")),
    (errors.Overloaded, _Kind(429, "rate_limit_error")),
    (errors.Unavailable, _Kind(503, "service_unavailable_error")),
    (errors.DeadlineExceeded, _Kind(504, "timeout_error")),
    (errors.Cancelled, _Kind(499, "cancelled_error")),  # as in google.rpc.Code; clients do not retry it
    (errors.TokaError, _Kind(500, "server_error")),
)
_UNAVAILABLE_RETRY_S = 1
_FATAL = frozenset({"QUARANTINED", "SCHEDULERS_LOST"})  # requests that crash workers or schedulers


def body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the JSON object of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_body(error: errors.TokaError) -> dict[str, Any]:
    """Return the JSON object for ``error``, which is also the last event of a failed stream."""
    return body(error.message, _kind(error).type, parameter_of(error) or None, error.reason.lower())


def to_response(error: errors.TokaError) -> Response:
    """Return the HTTP response for ``error``."""
    return response(status_of(error), to_body(error), headers_of(error))


def status_of(error: errors.TokaError) -> int:
    """Return the HTTP status of ``error``."""
    return _kind(error).status


def headers_of(error: errors.TokaError) -> dict[str, str]:
    """Return the headers that tell a client what to do about ``error``."""
    headers = {}
    if isinstance(error, errors.Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, errors.Unavailable):
        headers["retry-after"] = str(_UNAVAILABLE_RETRY_S)
    elif isinstance(error, errors.PayloadTooLarge):
        headers["connection"] = "close"
    elif isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = 'Bearer realm="tokasaurus"'
    elif isinstance(error, errors.DeadlineExceeded) or error.reason in _FATAL:
        headers["x-should-retry"] = "false"  # OpenAI's clients would retry it
    return headers


def response(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def _kind(error: errors.TokaError) -> _Kind:
    return next(kind for base, kind in _KINDS if isinstance(error, base))


def parameter_of(error: errors.TokaError) -> str:
    """Return the name of the invalid request parameter, or an empty string if ``error`` has none."""
    field: str = getattr(error, "field", "")
    known = _PARAMETERS.get(field.partition("[")[0])
    if known is not None:
        return known
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    return field
