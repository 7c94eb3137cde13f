"""The lines of an input file: read a block at a time, checked, and given a place among their like."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from services.common.batch_line import UsedIds, WrongLine, read_request
from services.gateway.batch.blobs import Blobs

MAX_LINES = 100_000
MAX_ERRORS = 100  # that a batch tells
_KEY_BYTES = 1024  # of a prompt's beginning


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


@dataclass
class LineChecker:
    """What a batch file must fulfil as a whole: each line a request to ``endpoint``, with a name of its own.

    Whatever is in a body is the request's own affair, and fails with it alone.
    """

    endpoint: str
    total: int = 0
    model: str | None = None  # of the first line
    errors: list[dict[str, Any]] = field(default_factory=list)
    _used: UsedIds = field(default_factory=UsedIds)

    def check(self, line: RawLine) -> bytes | None:
        """The line's sort key; None if something is wrong with it, which is in ``errors`` then."""
        self.total += 1
        if self.total > MAX_LINES:
            if self.total == MAX_LINES + 1:
                self.fail("too_many_requests", f"the file has more than {MAX_LINES} lines; split it", line.number)
            return None
        try:
            return self._read(line.text)
        except WrongLine as error:
            self.fail(error.code, str(error), line.number, error.param)
            return None

    def _read(self, text: bytes) -> bytes:
        request = read_request(text)
        url, body = request["url"], request["body"]
        if url != self.endpoint:
            raise WrongLine(
                "mismatched_url", f"url must be the batch's endpoint, {self.endpoint} (got {url[:64]!r})", "url"
            )
        self._used.add(request["custom_id"])
        if self.total == 1 and isinstance(body.get("model"), str):
            self.model = body["model"][:512].replace("\0", "")  # PostgreSQL takes none
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
