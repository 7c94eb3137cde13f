"""The lines of an input file: read a block at a time, checked, and given a place among their like."""

import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from services.gateway.batch.blobs import Blobs

MAX_LINES = 100_000
MAX_ERRORS = 100  # that a batch tells
MAX_ID_CHARACTERS = 512
_KEY_BYTES = 1024  # of a prompt's beginning
_BOM = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    """Where it lies in the file, and what it says. Lines count from 1."""

    number: int
    offset: int
    text: bytes


class LineTooLong(Exception):
    """More bytes than any request may have."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def read_lines(blobs: Blobs, name: str, most_bytes: int) -> AsyncGenerator[list[RawLine], None]:
    """Every line that is not empty, those of a block together. Raises ``LineTooLong``."""
    number, offset, rest = 0, 0, b""
    async for block in blobs.stream(name):
        texts = (rest + block).split(b"\n")
        rest = texts.pop()
        found, number, offset = _numbered(texts, number, offset)
        if found:
            yield found
        if len(rest) > most_bytes:
            raise LineTooLong(number + 1)
    found, _, _ = _numbered([rest], number, offset)
    if found:
        yield found


def _numbered(texts: list[bytes], number: int, offset: int) -> tuple[list[RawLine], int, int]:
    found = []
    for text in texts:
        number += 1
        if text.strip():
            found.append(RawLine(number, offset, text))
        offset += len(text) + 1
    return found, number, offset


def parse_line(text: bytes) -> Any:
    """Its JSON. Raises ``orjson.JSONDecodeError``."""
    return orjson.loads(text.removeprefix(_BOM))


class _Wrong(NamedTuple):
    """What is wrong with a line, and with which of its parameters."""

    code: str
    message: str
    param: str | None = None


@dataclass
class LineChecker:
    """What a batch file must fulfil as a whole: each line a request to ``endpoint``, with a name of its own.

    Whatever is in a body is the request's own affair, and fails with it alone.
    """

    endpoint: str
    total: int = 0
    model: str | None = None  # of the first line
    errors: list[dict[str, Any]] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)  # digests of custom_ids

    def check(self, line: RawLine) -> bytes | None:
        """The line's sort key; None if something is wrong with it, which is in ``errors`` then."""
        self.total += 1
        if self.total > MAX_LINES:
            if self.total == MAX_LINES + 1:
                self.fail("too_many_requests", f"the file has more than {MAX_LINES} lines; split it", line.number)
            return None
        found = self._read(line.text)
        if isinstance(found, _Wrong):
            self.fail(found.code, found.message, line.number, found.param)
            return None
        return found

    def _read(self, text: bytes) -> "bytes | _Wrong":
        try:
            request = parse_line(text)
        except orjson.JSONDecodeError as error:
            return _Wrong("invalid_json_line", f"this line is not valid JSON: {error}")
        if not isinstance(request, dict):
            return _Wrong("invalid_json_line", "this line is not a JSON object")
        for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
            if request.get(name) is None:
                return _Wrong("missing_required_parameter", f"missing required parameter: {name!r}", name)
            if not isinstance(request[name], kind):
                expected = "a string" if kind is str else "a JSON object"
                return _Wrong("invalid_value", f"{name} must be {expected}", name)
        return self._check_request(request)

    def _check_request(self, request: dict[str, Any]) -> "bytes | _Wrong":
        custom_id, method, url = request["custom_id"], request["method"], request["url"]
        if not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
            return _Wrong("invalid_value", f"custom_id must have 1 to {MAX_ID_CHARACTERS} characters", "custom_id")
        if method != "POST":
            return _Wrong("invalid_method", f"method must be POST (got {method[:64]!r})", "method")
        if url != self.endpoint:
            return _Wrong(
                "mismatched_url", f"url must be the batch's endpoint, {self.endpoint} (got {url[:64]!r})", "url"
            )
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            return _Wrong(
                "duplicate_custom_id", f"the custom_id {custom_id[:64]!r} is used by an earlier line", "custom_id"
            )
        self._seen.add(digest)
        body = request["body"]
        if self.total == 1 and isinstance(body.get("model"), str):
            self.model = body["model"][:512]
        return sort_key(body)

    def fail(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        """The whole file is refused."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "message": message, "line": line, "param": param})


def sort_key(body: dict[str, Any]) -> bytes:
    """Bodies whose prompts begin alike have keys that begin alike, whatever else they ask for."""
    head = [body.get("model"), body.get("cache_salt"), body.get("instructions"), body.get("tools")]
    prompt = next((body[name] for name in ("messages", "prompt", "input") if body.get(name) is not None), None)
    parts = [_beginning(value) for value in head if value is not None]
    if isinstance(prompt, list):
        size = 0
        for item in prompt[:_KEY_BYTES]:
            parts.append(_beginning(item))
            size += len(parts[-1])
            if size >= _KEY_BYTES:
                break
    elif isinstance(prompt, str):
        parts.append(prompt[:_KEY_BYTES].encode())
    return b"\0".join(parts)[: 2 * _KEY_BYTES]


def _beginning(value: Any) -> bytes:
    """Of its JSON; of what is nested too deeply to be written, nothing."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)[:_KEY_BYTES]
    except TypeError:
        return b""
