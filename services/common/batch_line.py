"""A line of a batch file: what it must be, whoever runs it."""

import hashlib
from typing import Any

import orjson

MAX_ID_CHARACTERS = 512
_BOM = b"\xef\xbb\xbf"


class WrongLine(ValueError):
    """A line that is no request: what is wrong with it, and with which of its parameters."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class UsedIds:
    """The custom_ids of a file so far: 16 bytes of each."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, custom_id: str) -> None:
        """Raises ``WrongLine`` for one that was added before."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._digests:
            raise WrongLine(
                "duplicate_custom_id", f"the custom_id {custom_id[:64]!r} is used by an earlier line", "custom_id"
            )
        self._digests.add(digest)


def parse_line(text: bytes) -> Any:
    """Its JSON. Raises ``orjson.JSONDecodeError``."""
    return orjson.loads(text.removeprefix(_BOM))


def read_request(text: bytes) -> dict[str, Any]:
    """The request of a line: ``custom_id``, ``method``, ``url`` and ``body``. Raises ``WrongLine``.

    Whether the url can be asked, and whatever is in the body, is for others to say.
    """
    try:
        request = parse_line(text)
    except orjson.JSONDecodeError as error:
        raise WrongLine("invalid_json_line", f"this line is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise WrongLine("invalid_json_line", "this line is not a JSON object")
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if request.get(name) is None:
            raise WrongLine("missing_required_parameter", f"missing required parameter: {name!r}", name)
        if not isinstance(request[name], kind):
            expected = "a string" if kind is str else "a JSON object"
            raise WrongLine("invalid_value", f"{name} must be {expected}", name)
    if not 1 <= len(request["custom_id"]) <= MAX_ID_CHARACTERS:
        raise WrongLine("invalid_value", f"custom_id must have 1 to {MAX_ID_CHARACTERS} characters", "custom_id")
    if request["method"] != "POST":
        raise WrongLine("invalid_method", f"method must be POST (got {request['method'][:64]!r})", "method")
    return request
