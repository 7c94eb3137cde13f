"""Reads one tool call in JSON, ``{"name": "f", "arguments": {...}}``, while the model writes it.

A partial JSON parser, such as pydantic's, does not serve: it returns values without their positions. Clients get the
arguments exactly as the model wrote them, and text that is no call from its first character on.
"""

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any

from services.gateway.openai.output.deltas import Arguments, CallBegun, Delta

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")  # Hermes and Qwen; Llama
_KEYS = (_NAME, *_ARGUMENTS, "type", "id")
_CLOSERS = {"{": "}", "[": "]"}
_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_PLAIN = re.compile(r"[\sA-Za-z0-9+\-.,:]*")  # of JSON outside strings and brackets
_SCALAR = re.compile(r"[A-Za-z0-9+\-.]*")


class ReadState(Enum):
    READING = "reading"
    DONE = "done"
    BROKEN = "broken"


_Read = tuple[int, ReadState, list[Delta]]  # where it stopped, whether the call is over, and what is new


class _Value:
    """Finds the end of one JSON value. It checks brackets and quotes, not every comma."""

    def __init__(self) -> None:
        self.raw = ""
        self._closers: list[str] = []
        self._in_string = self._escaped = self._scalar = False

    def take(self, text: str, start: int) -> tuple[int, ReadState]:
        """Reads from ``start``; gives where it stopped and whether the value is whole. ``BROKEN``: the character there
        cannot stand there."""
        at, state = start, ReadState.READING
        while at < len(text) and state is ReadState.READING:
            at, state = self._step(text, at)
        self.raw += text[start:at]
        return at, state

    def _step(self, text: str, at: int) -> tuple[int, ReadState]:
        character = text[at]
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            at = _IN_STRING.match(text, at).end()  # type: ignore[union-attr]  # it may be empty, and matches always
            if at == len(text):
                return at, ReadState.READING
            self._escaped, self._in_string = text[at] == "\\", text[at] != '"'
            if not self._in_string and not self._closers:
                return at + 1, ReadState.DONE
        elif self._scalar or not (self._closers or character in '"{['):
            end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]  # as above
            if end == at and not self._scalar:
                return at, ReadState.BROKEN
            self._scalar = True
            return end, ReadState.READING if end == len(text) else ReadState.DONE
        elif character == '"':
            self._in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif character == self._closers[-1]:
            self._closers.pop()
            if not self._closers:
                return at + 1, ReadState.DONE
        else:
            end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]  # as above
            return end, ReadState.READING if end > at else ReadState.BROKEN
        return at + 1, ReadState.READING


class CallReader:
    """Reads one call. Nothing is told before it is certain that it is one: its name is ``known``, and the arguments
    begin as an object does. From then on they are told as they come."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        self._known = known
        self.untold = ""  # what was taken and is in no delta
        self.begun = False  # the call was told
        self.arguments_open = False  # and its arguments have not ended
        self._expected: Callable[[str, int], _Read] = self._opening
        self._key = _Value()
        self._value = _Value()
        self._name: str | None = None
        self._arguments: str | None = None

    def take(self, text: str, start: int) -> _Read:
        """Reads from ``start`` to where it stopped: behind the call, or at the character that belongs to none."""
        at, state = start, ReadState.READING
        deltas: list[Delta] = []
        while at < len(text) and state is ReadState.READING:
            end, state, told = self._expected(text, at)
            if not told:
                self.untold += text[at:end]
            deltas += told
            at = end
        if state is ReadState.DONE:
            self.untold = ""
        return at, state, deltas

    # Each reads what may come next.

    def _opening(self, text: str, at: int) -> _Read:
        self._expected = self._begin_key
        return at + 1, ReadState.READING if text[at] == "{" else ReadState.BROKEN, []

    def _begin_key(self, text: str, at: int) -> _Read:
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # as above
        if end == len(text):
            return end, ReadState.READING, []
        if text[end] != '"':
            return end, ReadState.BROKEN, []
        self._key, self._expected = _Value(), self._read_key
        return end, ReadState.READING, []

    def _read_key(self, text: str, at: int) -> _Read:
        end, state = self._key.take(text, at)
        if state is not ReadState.DONE:
            return end, state, []
        self._expected = self._colon
        return end, ReadState.READING if _decoded(self._key.raw) in _KEYS else ReadState.BROKEN, []

    def _colon(self, text: str, at: int) -> _Read:
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # as above
        if end == len(text):
            return end, ReadState.READING, []
        self._expected = self._begin_value
        return (end + 1, ReadState.READING, []) if text[end] == ":" else (end, ReadState.BROKEN, [])

    def _begin_value(self, text: str, at: int) -> _Read:
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # as above
        if end == len(text):
            return end, ReadState.READING, []
        self._value, self._expected = _Value(), self._read_value
        told: list[Delta] = []
        if self._at_arguments and self._name is not None and text[end] == "{":
            told = self._begin(self._name)
            self._expected, self.arguments_open = self._read_arguments, True
        return end, ReadState.READING, told

    def _read_arguments(self, text: str, at: int) -> _Read:
        end, state = self._value.take(text, at)
        if state is ReadState.DONE:
            self._arguments, self.arguments_open, self._expected = self._value.raw, False, self._next
            state = ReadState.READING
        return end, state, [Arguments(text[at:end])] if end > at else []

    def _read_value(self, text: str, at: int) -> _Read:
        end, state = self._value.take(text, at)
        if state is not ReadState.DONE:
            return end, state, []
        self._expected = self._next
        told: list[Delta] = []
        if _decoded(self._key.raw) == _NAME and self._name is None:
            name = _decoded(self._value.raw)
            if not isinstance(name, str) or not name or not self._known(name):
                return end, ReadState.BROKEN, []
            self._name = name
        elif self._at_arguments:
            self._arguments = _as_object(self._value.raw)
            if self._arguments is None:
                return end, ReadState.BROKEN, []
        if self._name is not None and self._arguments is not None and not self.begun:
            told = [*self._begin(self._name), Arguments(self._arguments)]
        return end, ReadState.READING, told

    def _next(self, text: str, at: int) -> _Read:
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # as above
        if end == len(text):
            return end, ReadState.READING, []
        if text[end] == ",":
            self._expected = self._begin_key
            return end + 1, ReadState.READING, []
        if text[end] != "}" or self._name is None:
            return end, ReadState.BROKEN, []
        return end + 1, ReadState.DONE, [] if self.begun else [*self._begin(self._name), Arguments("{}")]

    @property
    def _at_arguments(self) -> bool:
        return self._arguments is None and _decoded(self._key.raw) in _ARGUMENTS

    def _begin(self, name: str) -> list[Delta]:
        self.begun, self.untold = True, ""
        return [CallBegun(name)]


def _decoded(raw: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _as_object(raw: str) -> str | None:
    """Arguments that were not told as they came: an object, an object written in a string, or nothing."""
    value = _decoded(raw)
    if isinstance(value, str):
        raw, value = value, _decoded(value)
    if value is None and raw.strip() == "null":
        return "{}"
    return raw if isinstance(value, dict) else None
