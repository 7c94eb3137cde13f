"""Parses and checks the lines of a batch file."""

import hashlib
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.common.large_json import PIECE_BYTES, load

MAX_ID_CHARACTERS = 512
MAX_VALUES = 2**20  # JSON values of a line; unlike in a request's body, token ids count
_BOM = b"\xef\xbb\xbf"


class InvalidLine(ValueError):
    """Error of a line that is not a valid request. ``param`` is the wrong parameter."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class UsedIds:
    """Set of the ``custom_id`` values of earlier lines, stored in 16 bytes each."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, custom_id: str) -> None:
        """Add ``custom_id``. Raises ``InvalidLine`` if it was added before."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._digests:
            raise InvalidLine(
                "duplicate_custom_id", f"the custom_id {custom_id[:64]!r} is used by an earlier line", "custom_id"
            )
        self._digests.add(digest)


def parse_line(text: bytes) -> Any:
    """Return the JSON value of a line. Call it in a thread if ``is_large``.

    Raises ``orjson.JSONDecodeError``, and ``InvalidRequest`` for more than ``MAX_VALUES`` values.
    """
    return load(text.removeprefix(_BOM), most=MAX_VALUES)


def is_large(text: bytes) -> bool:
    """Return whether a line must be parsed in a thread."""
    return len(text) > PIECE_BYTES


def read_request(text: bytes) -> dict[str, Any]:
    """Return the request of a line: ``custom_id``, ``method``, ``url`` and ``body``. Raises ``InvalidLine``.

    The caller checks the url and the members of the body.
    """
    try:
        request = parse_line(text)
    except orjson.JSONDecodeError as error:
        raise InvalidLine("invalid_json_line", f"this line is not valid JSON: {error}") from None
    except InvalidRequest as error:
        raise InvalidLine(
            "invalid_value", f"this line cannot be parsed: {error.message}", error.field or None
        ) from None
    if not isinstance(request, dict):
        raise InvalidLine("invalid_json_line", "this line is not a JSON object")
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if request.get(name) is None:
            raise InvalidLine("missing_required_parameter", f"missing required parameter: {name!r}", name)
        if not isinstance(request[name], kind):
            expected = "a string" if kind is str else "a JSON object"
            raise InvalidLine("invalid_value", f"{name} must be {expected}", name)
    if not 1 <= len(request["custom_id"]) <= MAX_ID_CHARACTERS:
        raise InvalidLine("invalid_value", f"custom_id must have 1 to {MAX_ID_CHARACTERS} characters", "custom_id")
    if request["method"] != "POST":
        raise InvalidLine("invalid_method", f"method must be POST (got {request['method'][:64]!r})", "method")
    return request
