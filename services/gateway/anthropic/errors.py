"""Anthropic's JSON and HTTP status of errors: ``{"type": "error", "error": {"type", "message", "details"}, ...}``."""

import re
from collections.abc import Collection, MutableMapping
from typing import Any

import orjson
from fastapi import Response

from services.common import errors
from services.gateway.http import errors as openai_errors
from services.gateway.http.request import name_request

VERSION_HEADER = "anthropic-version"
REQUEST_ID_HEADER = "request-id"
CREATE = "/v1/messages"
_OVERLOADED_STATUS = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    _OVERLOADED_STATUS: "overloaded_error",
}
# Claude Code shortens a conversation if an error has these words.
_TOO_LONG = "prompt is too long: "

# Parameters of chat completions, as they appear in error messages, and their names in the Messages API.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b")


def is_anthropic(scope: MutableMapping[str, Any]) -> bool:
    """Return whether the client of a request expects Anthropic's errors: by its path or by its version header."""
    path = scope["path"]
    return (
        path == CREATE
        or path.startswith(f"{CREATE}/")
        or any(name == VERSION_HEADER.encode() for name, _ in scope["headers"])
    )


def in_own_words(error: errors.TokaError, sent: Collection[str] = ()) -> errors.TokaError:
    """Return ``error`` of the chat pipeline with the parameter names of the Messages API.

    Names that the client ``sent`` are kept. The message names the invalid parameter, since Anthropic's errors have no
    field for it.
    """
    message = error.message
    if error.reason == "CONTEXT_LENGTH_EXCEEDED":
        message = message if message.startswith(_TOO_LONG) else _TOO_LONG + message
    elif isinstance(error, errors.InvalidRequest) and (name := openai_errors.parameter_of(error)) not in message:
        message = f"{name}: {message}"
    error.message = _NAME.sub(lambda name: name[0] if name[0] in sent else _NAMES[name[0]], message)
    return error


def to_body(error: errors.TokaError, request_id: str) -> dict[str, Any]:
    """Return the JSON object for ``error``, which is also the data of a stream's ``error`` event."""
    return body(_status(error), error.message, request_id, error.reason.lower())


def body(status: int, message: str, request_id: str, code: str) -> dict[str, Any]:
    """Return the JSON object of an error with the given HTTP status. ``code`` names its cause."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message, "details": {"error_code": code}}
    return {"type": "error", "error": error, "request_id": request_id}


def to_response(error: errors.TokaError, scope: MutableMapping[str, Any]) -> Response:
    """Return the HTTP response for ``error``."""
    return response(_status(error), error.message, error.reason.lower(), scope, openai_errors.headers_of(error))


def response(
    status: int, message: str, code: str, scope: MutableMapping[str, Any], headers: dict[str, str]
) -> Response:
    """Return the HTTP response of an error. ``code`` names its cause."""
    request_id = name_request(scope)
    content = orjson.dumps(body(status, message, request_id, code))
    return Response(content, status, headers | {REQUEST_ID_HEADER: request_id}, media_type="application/json")


def _status(error: errors.TokaError) -> int:
    """Return the status of OpenAI's errors, except 529 for a full queue as in Anthropic's API."""
    if isinstance(error, errors.Overloaded) and error.reason == errors.Overloaded.reason:
        return _OVERLOADED_STATUS
    return openai_errors.status_of(error)
