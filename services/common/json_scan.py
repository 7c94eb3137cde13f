"""Scans a JSON text to count its values and find positions at which it can be split, before any value is created."""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import orjson

from services.common.errors import InvalidRequest

MAX_VALUES = 2**17  # strings, numbers, lists and objects of a document
MAX_MEMBERS = 1024  # of the document's root object
CUT_DEPTH = 16  # nesting from which a value is parsed in one call
_MAX_DEPTH = 1024  # orjson's own limit

Raw: TypeAlias = bytes | bytearray

QUOTE = ord('"')
SPACE = b" \t\r\n"
_BACKSLASH, _COMMA = b"\\,"
_OPEN, _CLOSE = b"{}"
_NAME = re.compile(rb'[ \t\r\n]*"([^"\\]{1,256})"')
_CASE = 0x20  # the bit in which braces differ from brackets


class Bulk(NamedTuple):
    """A member of the document's object that may have more than ``MAX_VALUES`` values.

    ``most`` limits the entries of an object. None stands for token ids, which are read into arrays.
    """

    most: int | None = None


Bulks: TypeAlias = Mapping[str, Bulk]


class TooManyValues(InvalidRequest):
    """The document has more values than the server accepts."""

    reason = "TOO_MANY_VALUES"


def name_at(raw: Raw, at: int) -> str:
    """Return the name of the member at ``at``, or an empty string if the name is long or contains escapes."""
    found = _NAME.match(raw, at)
    return found[1].decode(errors="replace") if found else ""


def bulk_at(raw: Raw, at: int, bulks: Bulks) -> str:
    """Return the name of the member at ``at`` if it is in ``bulks``, else an empty string."""
    name = name_at(raw, at)
    return name if name in bulks else ""


def invalid(what: str, at: int) -> orjson.JSONDecodeError:
    """Return the error for invalid JSON at byte ``at`` or after it."""
    return orjson.JSONDecodeError(f"{what}, at byte {at} or after it", "", 0)


class Scan:
    """Positions at which a document can be split: for each depth, the first and the last comma of each slice.

    Between two adjacent cuts of a depth there is either at most one slice of text, or exactly one value.
    """

    def __init__(self, raw: Raw, bulks: Bulks, most: int, slice_bytes: int) -> None:
        self.cuts: list[list[int]] = [[] for _ in range(CUT_DEPTH + 1)]
        self._raw, self._bulks, self._most, self._slice_bytes = raw, bulks, most, slice_bytes
        self._escaped = self._inside = False  # state of the next character
        self._depth = 0
        self._values, self._members = 1, 0
        self._bulk: Bulk | None = None  # the member that contains the next character
        self._bulk_values = self._member_at = 0
        root = next((code for code in raw[:1024].lstrip(SPACE)[:1]), 0)
        self._members_named = root == ord("{")
        if self._members_named:
            self._enter_member(raw.index(b"{") + 1)
        for start in range(0, len(raw), slice_bytes):
            self._scan(start, np.frombuffer(raw, np.uint8, min(slice_bytes, len(raw) - start), start))
        if self._inside or self._depth:
            raise invalid("the text ends inside of a string, a list or an object", len(raw))

    def _scan(self, start: int, text: np.ndarray) -> None:
        """Scan a slice of the document. ``text`` is uint8 [bytes]."""
        outside = self._outside_strings(text)
        folded = text | _CASE
        opens, closes = (folded == _OPEN) & outside, (folded == _CLOSE) & outside
        # int32 [bytes]: depth of each character. A bracket has the depth inside it.
        depths = np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32) + self._depth
        if depths.max() > _MAX_DEPTH or depths.min() < 0:
            raise invalid("brackets do not match, or are nested too deeply", start)
        self._depth = int(depths[-1])
        commas = np.flatnonzero((text == _COMMA) & outside)
        comma_depths = depths[commas]
        self._count(start, np.flatnonzero(opens), commas, comma_depths)
        for depth in np.unique(comma_depths[comma_depths <= CUT_DEPTH]).tolist():
            there = commas[comma_depths == depth]
            self.cuts[depth] += dict.fromkeys((start + int(there[0]), start + int(there[-1])))

    def _outside_strings(self, text: np.ndarray) -> np.ndarray:
        """Return a mask of the characters outside of strings. bool [bytes]."""
        quotes = text == QUOTE
        slashes = np.flatnonzero(text == _BACKSLASH)
        if self._escaped:
            quotes[0] = False
            slashes = slashes[1:] if len(slashes) and slashes[0] == 0 else slashes
        self._escaped = False
        if len(slashes):
            begins = np.concatenate(([True], np.diff(slashes) != 1))  # starts of runs of backslashes
            first = slashes[np.maximum.accumulate(np.where(begins, np.arange(len(slashes)), 0))]
            escaped = slashes[(slashes - first) % 2 == 0] + 1
            self._escaped = bool(escaped[-1] == len(text))
            quotes[escaped[:-1] if self._escaped else escaped] = False
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8))
        if self._inside:
            inside ^= 1
        self._inside = bool(inside[-1])
        outside: np.ndarray = inside == 0
        return outside

    def _count(self, start: int, opens: np.ndarray, commas: np.ndarray, depths: np.ndarray) -> None:
        """Count the values of a slice, separately for each member of the document's object."""
        bounds = commas[depths == 1].tolist() if self._members_named else []
        self._members += len(bounds)
        if self._members >= MAX_MEMBERS:
            raise InvalidRequest(f"the body has more than {MAX_MEMBERS} parameters")
        for place, bound in enumerate([*bounds, None]):
            before, after = (bounds[place - 1] if place else 0), self._slice_bytes if bound is None else bound
            there = slice(np.searchsorted(commas, before), np.searchsorted(commas, after))
            begun = np.searchsorted(opens, after) - np.searchsorted(opens, before)
            self._add(int(begun), depths[there])
            if bound is not None:
                self._enter_member(start + bound + 1)

    def _enter_member(self, at: int) -> None:
        self._bulk_values, self._member_at = 0, at
        name = bulk_at(self._raw, at, self._bulks)
        self._bulk = self._bulks[name] if name else None

    def _add(self, begun: int, depths: np.ndarray) -> None:
        self._values += begun
        if self._bulk is None:
            self._values += len(depths)
        else:
            deepest = 3 if self._bulk.most is None else 2
            free = int(np.count_nonzero(depths <= deepest))
            self._values += len(depths) - free
            self._bulk_values += free
            if self._bulk.most is not None and self._bulk_values > self._bulk.most:
                self._values += free
        if self._values > self._most:
            raise TooManyValues(
                f"the body has more than {self._most} values, which are strings, numbers, lists and objects"
                f"{self._uncounted()}; send several requests",
                field=name_at(self._raw, self._member_at) if self._members_named else "",
            )

    def _uncounted(self) -> str:
        names = [name for name, bulk in self._bulks.items() if bulk.most is None]
        return f" (token ids in {names[0]!r} do not count)" if names else ""
