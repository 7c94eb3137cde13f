"""The lines of an input file: read in blocks, checked, and given a key to sort them by."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from services.common.batch_line import InvalidLine, UsedIds, is_large, parse_line, read_request
from services.gateway.store.blobs import Blobs

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
    splitter = _Splitter(most_lines)
    async with aclosing(blobs.stream(name)) as blocks:
        async for block in blocks:
            splitter.add(block)
            while (some := await blobs.in_thread(splitter.take)) is not None:
                if some:
                    yield some
            if splitter.rest_bytes > most_bytes:
                raise LineTooLong(splitter.number + 1)
    splitter.add(b"\n")
    if some := await blobs.in_thread(splitter.take):
        yield some


class _Splitter:
    """Splits blocks of a file into lines. One thread uses it at a time."""

    def __init__(self, most: int) -> None:
        self.number = 0  # of the last line that was taken
        self.rest_bytes = 0  # size of ``_rest``
        self._most = most
        self._offset = 0  # of the first byte of ``_block`` in the file
        self._block = b""
        self._at = 0  # index in ``_block`` of the first byte that was not taken
        self._rest: list[bytes] = []  # parts of a line whose end has not been read

    def add(self, block: bytes) -> None:
        """Add the next block. All lines of the previous block have been taken."""
        self._offset += len(self._block)
        self._block, self._at = block, 0

    def take(self) -> list[RawLine] | None:
        """Return the next lines of the block that are not empty, or None if no further line ends in it.

        At most ``most`` lines are taken, empty ones included.
        """
        found: list[RawLine] = []
        for taken in range(self._most):
            end = self._block.find(b"\n", self._at)
            if end < 0:
                if not taken:
                    self._keep_rest()
                    return None
                break
            text = self._block[self._at : end]
            offset = self._offset + self._at - self.rest_bytes
            if self._rest:
                text = b"".join((*self._rest, text))
                self._rest, self.rest_bytes = [], 0
            self.number += 1
            self._at = end + 1
            if text.strip():
                found.append(RawLine(self.number, offset, text))
        return found

    def _keep_rest(self) -> None:
        if rest := self._block[self._at :]:
            self._rest.append(rest)
            self.rest_bytes += len(rest)
            self._at = len(self._block)


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
