"""Parses JSON that a client may have written to be expensive.

orjson holds the GIL during a call, so a large document stops every thread of the process, and an empty object takes 64
bytes of memory for 3 bytes of text. ``load`` limits both. It counts the values of a large document before it creates
any, parses the document in pieces of at most ``PIECE_BYTES``, and reads lists of token ids into arrays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from services.common.errors import InvalidRequest
from services.common.json_scan import CUT_DEPTH, MAX_VALUES, QUOTE, SPACE, Bulks, Raw, Scan, bulk_at, invalid

PIECE_BYTES = 128 * 1024  # parsed in one call; takes about 10 ms if it consists of empty lists
MAX_LISTS = 2**16  # lists or strings in a list of token ids
MAX_CHARACTERS = 2**23  # of a string; no other thread runs while its pieces are joined
_DEEP_BYTES = 2**21  # of a value that is nested too deeply to be split
_FEW = 64  # up to this number of values, a Python loop is as fast as numpy
_LONGEST_ESCAPE = 12  # bytes of an escaped surrogate pair
_ENDS = {ord("["): ord("]"), ord("{"): ord("}")}


def count_marks(raw: Raw) -> int:
    """Return an upper bound of the number of values in ``raw``: its commas and brackets, including those in strings."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def load(raw: Raw, bulks: Bulks | None = None, *, most: int = MAX_VALUES, piece_bytes: int = PIECE_BYTES) -> Any:
    """Return the value of the JSON text ``raw``. Any thread may call it.

    In a large document, a list of token ids in a member of ``bulks`` becomes a uint32 array, and a list of such lists a
    list of arrays. Raises ``orjson.JSONDecodeError``, and ``InvalidRequest`` for more than ``most`` values.
    """
    if len(raw) <= piece_bytes:
        return orjson.loads(raw)
    return _Document(raw, bulks or {}, most, piece_bytes).value()


class _Document:
    """Large document that is parsed in pieces."""

    def __init__(self, raw: Raw, bulks: Bulks, most: int, piece_bytes: int) -> None:
        self._raw, self._bulks, self._most_bytes = raw, bulks, piece_bytes
        self._field = ""  # the current member of the document's object
        self._cuts = Scan(raw, bulks, most, piece_bytes).cuts

    def value(self) -> Any:
        """Return the value of the whole document."""
        start, end = self._strip(0, len(self._raw))
        return self._value(start, end, 0)

    def _value(self, start: int, end: int, depth: int) -> Any:
        """Return the value of the text from ``start`` to ``end``, without whitespace around it.

        ``depth`` is the number of lists and objects around it.
        """
        raw = self._raw
        if end - start <= self._most_bytes:
            return self._load(start, end)
        if depth >= CUT_DEPTH:
            return self._deep(start, end)
        if raw[start] == QUOTE:
            return self._text(start, end)
        if raw[end - 1] != _ENDS.get(raw[start]):
            raise invalid("the brackets of a value do not match", start)
        if raw[start] == ord("["):
            return self._list(start, end, depth + 1)
        return self._object(start, end, depth + 1)

    def _deep(self, start: int, end: int) -> Any:
        """Return a value that is nested too deeply to be split."""
        if end - start > _DEEP_BYTES:
            raise InvalidRequest(
                f"a value inside of {CUT_DEPTH} lists and objects has {end - start} bytes: at most {_DEEP_BYTES}; make"
                " the body flatter, or the value shorter",
                field=self._field,
            )
        return self._load(start, end)

    def _list(self, start: int, end: int, depth: int) -> list[Any]:
        values: list[Any] = []
        for first, last in self._pieces(start, end, depth):
            if last - first <= self._most_bytes:
                values += self._load(first, last, b"[]")
            else:
                values.append(self._value(first, last, depth))
        return values

    def _object(self, start: int, end: int, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for first, last in self._pieces(start, end, depth):
            bulk = bulk_at(self._raw, first, self._bulks) if depth == 1 else ""
            if last - first <= self._most_bytes and not bulk:
                values.update(self._load(first, last, b"{}"))
                continue
            name, at = self._name(first, last)
            self._field = name if depth == 1 else self._field
            ids = bulk and self._bulks[bulk].most is None and self._raw[at] == ord("[")
            if ids and last - at > self._most_bytes:
                values[name] = self._token_ids(at, last, name)
            else:
                values[name] = self._value(at, last, depth)
        return values

    def _token_ids(self, start: int, end: int, field: str) -> Any:
        """Return a list of token ids as a uint32 array, or a list of such lists as a list of arrays.

        If the list contains another value, return a nested list with it, for which validation raises the error.
        """
        flat, found = array("I"), []
        for first, last in self._pieces(start, end, 2):
            try:
                if last - first > self._most_bytes:
                    found.append(self._long_item(first, last))
                    continue
                values = self._load(first, last, b"[]")
                if not _append_ids(flat, values):
                    found += [_list_of_ids(value) for value in values]
            except _NotTokenIds as error:
                return [[error.value]]
            if len(found) > MAX_LISTS:
                raise InvalidRequest(
                    f"{field}: more than {MAX_LISTS} prompts; send several requests",
                    field=field,
                    reason="INVALID_VALUE",
                )
        if flat and found:
            return [[found[0] if isinstance(found[0], str) else []]]
        return np.frombuffer(flat, np.uint32) if flat else found

    def _long_item(self, start: int, end: int) -> Any:
        """Return a long string, or a long list of token ids. Raises ``_NotTokenIds``."""
        if self._raw[start] != ord("["):
            value = self._value(start, end, 2)
            if isinstance(value, str):
                return value
            raise _NotTokenIds({})
        if self._raw[end - 1] != ord("]"):
            raise invalid("the brackets of a value do not match", start)
        ids = array("I")
        for first, last in self._pieces(start, end, 3):
            values = self._load(first, last, b"[]") if last - first <= self._most_bytes else [[]]
            if not _append_ids(ids, values):
                raise _NotTokenIds(next(value for value in values if not _is_id(value)))
        return np.frombuffer(ids, np.uint32)

    def _pieces(self, start: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of parts of a list or object. Each part contains one or more members."""
        cuts = self._cuts[depth]
        there = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
        for first, last in zip([start, *there], [*there, end - 1], strict=True):
            part = self._strip(first + 1, last)
            if part[0] == part[1]:
                raise invalid("a value is missing", first)
            yield part

    def _name(self, start: int, end: int) -> tuple[str, int]:
        """Return the name of the member at ``start``, and the start of its value."""
        raw = self._raw
        at = start + 1
        while True:
            at = raw.find(b'"', at, min(end, start + self._most_bytes))
            if raw[start] != QUOTE or at < 0:
                raise invalid("a name is missing, or is too long", start)
            slashes = len(raw[start:at]) - len(raw[start:at].rstrip(b"\\"))
            at += 1
            if slashes % 2 == 0:
                break
        name = self._load(start, at)
        colon, _ = self._strip(at, end)
        if colon >= end or raw[colon] != ord(":"):
            raise invalid("a colon is missing", at)
        value, _ = self._strip(colon + 1, end)
        if value >= end:
            raise invalid("a value is missing", colon)
        return name, value

    def _text(self, start: int, end: int) -> str:
        """Return a long string, decoded in pieces."""
        parts, characters, at = [], 0, start + 1
        while end - 1 - at > self._most_bytes:
            for cut in range(at + self._most_bytes, at + self._most_bytes - _LONGEST_ESCAPE - 1, -1):
                try:
                    parts.append(self._load(at, cut, b'""'))
                except orjson.JSONDecodeError:  # the cut is inside an escape or a character
                    continue
                at = cut
                break
            else:
                raise invalid("a string cannot be parsed", at)
            if (characters := characters + len(parts[-1])) > MAX_CHARACTERS:
                raise InvalidRequest(
                    f"the body has a string of more than {MAX_CHARACTERS} characters; send a shorter one, or several",
                    field=self._field,
                )
        parts.append(self._load(at, end - 1, b'""'))
        return "".join(parts)

    def _load(self, start: int, end: int, around: bytes = b"") -> Any:
        return orjson.loads(around[:1] + self._raw[start:end] + around[1:])

    def _strip(self, start: int, end: int) -> tuple[int, int]:
        """Return the bounds without whitespace at both ends."""
        raw = self._raw
        while start < end and raw[start] in SPACE:
            some = raw[start : min(end, start + self._most_bytes)]
            start += len(some) - len(some.lstrip(SPACE))
        while start < end and raw[end - 1] in SPACE:
            some = raw[max(start, end - self._most_bytes) : end]
            end -= len(some) - len(some.rstrip(SPACE))
        return start, end


class _NotTokenIds(Exception):
    """A list of token ids contains another value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _append_ids(ids: array[int], values: list[Any]) -> bool:
    """Append ``values`` to ``ids``. Return False and append nothing if a value is not a token id."""
    try:
        more = array("I", values)
    except (TypeError, OverflowError):
        return False
    known = len(more) > _FEW and np.frombuffer(more, np.uint32).min() > 1  # an array stores True as 1
    if known or all(map(_is_id, values)):
        ids.extend(more)
        return True
    return False


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _list_of_ids(value: Any) -> Any:
    """Return a string unchanged, and a list of token ids as an array. Raises ``_NotTokenIds``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _NotTokenIds(value)
    ids = array("I")
    if not _append_ids(ids, value):
        raise _NotTokenIds(next(each for each in value if not _is_id(each)))
    return np.array(ids, np.uint32)
