"""The lines of an input file: read in blocks, checked, and given a key to sort them by."""

import asyncio
import io
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from services.common.batch_line import InvalidLine, UsedIds, is_large, parse_line, read_request
from services.gateway.store.blobs import BLOCK_BYTES, Blobs

MAX_LINES = 100_000
MAX_ERRORS = 100  # reported for one Batch job
_KEY_BYTES = 1024  # of the beginning of a prompt


async def parse(text: bytes) -> Any:
    """Return the JSON value of a line, parsed in a thread if it is large. Raises the errors of ``parse_line``."""
    return await asyncio.to_thread(parse_line, text) if is_large(text) else parse_line(text)


class RawLine(NamedTuple):
    """A line of the input file, without its line end."""

    number: int  # the first line is 1
    offset: int  # bytes before it in the file
    text: bytes


class LineTooLong(Exception):
    """Raised for a line with more bytes than a request may have."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def read_lines(
    blobs: Blobs, name: str, most_bytes: int, most_lines: int = 1024
) -> AsyncGenerator[list[RawLine], None]:
    """Yield every line that is not empty, at most ``most_lines`` together. Raises ``LineTooLong``."""
    number = offset = 0

    def read_some() -> list[RawLine] | None:
        """Return further lines, of about a block, or None at the end of the file."""
        nonlocal number, offset
        found: list[RawLine] = []
        end = offset + BLOCK_BYTES
        for _ in range(most_lines):
            if not (line := buffered.readline(most_bytes + 2)):
                return found or None
            number += 1
            text = line.removesuffix(b"\n")
            if len(text) > most_bytes:
                raise LineTooLong(number)
            if text.strip():
                found.append(RawLine(number, offset, text))
            offset += len(line)
            if offset >= end:
                break
        return found

    async with blobs.reading(name) as file:
        buffered = io.BufferedReader(file, BLOCK_BYTES)
        while (some := await blobs.in_thread(read_some)) is not None:
            if some:
                yield some


@dataclass
class LineChecker:
    """Checks the rules for a whole input file: each line is a request to ``endpoint`` with a unique ``custom_id``.

    Bodies are not checked: a request with an invalid body fails alone, when it runs.
    """

    endpoint: str
    total: int = 0
    model: str | None = None  # of the first line
    errors: list[dict[str, Any]] = field(default_factory=list)
    _used: UsedIds = field(default_factory=UsedIds)

    def check(self, line: RawLine) -> bytes | None:
        """Return the line's sort key, or None after adding an error to ``errors``."""
        self.total += 1
        if self.total > MAX_LINES:
            if self.total == MAX_LINES + 1:
                self.fail("too_many_requests", f"the file has more than {MAX_LINES} lines; split it", line.number)
            return None
        try:
            return self._read(line.text)
        except InvalidLine as error:
            self.fail(error.code, str(error), line.number, error.param)
            return None

    @property
    def is_hopeless(self) -> bool:
        """A file whose remaining lines cannot change the result."""
        return len(self.errors) >= MAX_ERRORS or self.total > MAX_LINES

    def _read(self, text: bytes) -> bytes:
        request = read_request(text)
        url, body = request["url"], request["body"]
        if url != self.endpoint:
            raise InvalidLine(
                "mismatched_url", f"url must be the batch's endpoint, {self.endpoint} (got {url[:64]!r})", "url"
            )
        self._used.add(request["custom_id"])
        if self.total == 1 and isinstance(body.get("model"), str):
            self.model = body["model"][:512].replace("\0", "")  # PostgreSQL takes none
        return sort_key(body)

    def fail(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        """Add an error, which rejects the whole file."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "message": message, "line": line, "param": param})


def sort_key(body: dict[str, Any]) -> bytes:
    """Return a key by which bodies whose prompts begin alike are neighbours, whatever their other parameters."""
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
    """Return the beginning of ``value`` as JSON, or nothing if it is nested too deeply to be written."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)[:_KEY_BYTES]
    except TypeError:
        return b""
