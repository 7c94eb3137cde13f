"""Reads one tool call in JSON, ``{"name": "f", "arguments": {...}}``, while the model writes it.

A partial JSON parser, such as pydantic's, does not serve: it returns values without their positions. Clients get the
arguments exactly as the model wrote them, and text that is no call from its first character on.
"""

import json
import re
from collections.abc import Callable, Generator
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
    """The state of a call after the text so far."""

    READING = "reading"
    DONE = "done"
    BROKEN = "broken"  # the next character cannot be part of a call


class _NoCallError(Exception):
    """The next character cannot be part of a call."""


class CallReader:
    """Reads one call.

    It returns no delta before the name of the call is ``known`` and its arguments begin as an object does. From then on
    it returns the arguments as they arrive.
    """

    def __init__(self, known: Callable[[str], bool]) -> None:
        self.untold = ""  # text that was read and is in no delta
        self.begun = False  # the call was returned
        self.arguments_open = False  # the call was returned, and its arguments have not ended
        self._known = known
        self._name: str | None = None
        self._arguments: str | None = None
        self._text, self._at = "", 0  # the text that is read, and the next character
        self._told = 0  # characters of ``_text`` that are in deltas
        self._deltas: list[Delta] = []
        self._steps = self._call()

    def take(self, text: str, start: int) -> tuple[int, ReadState, list[Delta]]:
        """Read ``text`` from ``start``. Return the index after the call, or of the character that is not part of it."""
        self._text, self._at, self._told, self._deltas = text, start, start, []
        state = ReadState.READING
        try:
            next(self._steps)
        except StopIteration:
            state = ReadState.DONE
        except _NoCallError:
            state = ReadState.BROKEN
        self.untold = "" if state is ReadState.DONE else self.untold + text[self._told : self._at]
        return self._at, state, self._deltas

    # Each generator reads a part of the call, and yields when it needs more text.

    def _call(self) -> Generator[None]:
        yield from self._sign("{")
        end = ","
        while end == ",":
            self._at += 1
            yield from self._sign('"')
            key = _decoded((yield from self._value()))
            if key not in _KEYS:
                raise _NoCallError
            yield from self._sign(":")
            self._at += 1
            yield from self._member(key)
            end = yield from self._sign(",}" if self._name is not None else ",")
        self._at += 1
        if self._name is not None and not self.begun:
            self._begin(self._name, "{}")

    def _member(self, key: str) -> Generator[None]:
        begin = yield from self._sign()
        is_arguments = self._arguments is None and key in _ARGUMENTS
        if is_arguments and self._name is not None and begin == "{":
            self._begin(self._name)
            self.arguments_open = True
            self._arguments = yield from self._value(tell=True)
            self.arguments_open = False
            return
        raw = yield from self._value()
        if key == _NAME and self._name is None:
            name = _decoded(raw)
            if not isinstance(name, str) or not name or not self._known(name):
                raise _NoCallError
            self._name = name
        elif is_arguments and (_arguments := _as_object(raw)) is not None:
            self._arguments = _arguments
        elif is_arguments:
            raise _NoCallError
        if self._name is not None and self._arguments is not None and not self.begun:
            self._begin(self._name, self._arguments)

    def _begin(self, name: str, arguments: str | None = None) -> None:
        """Return the call, and its ``arguments`` if they are complete."""
        self.begun, self.untold, self._told = True, "", self._at
        self._deltas += [CallBegun(name)] if arguments is None else [CallBegun(name), Arguments(arguments)]

    def _sign(self, allowed: str | None = None) -> Generator[None, None, str]:
        """Skip white space, and return the next character, which must be in ``allowed``. None: any character."""
        while self._skip(_SPACE):
            yield
        if allowed is not None and self._text[self._at] not in allowed:
            raise _NoCallError
        return self._text[self._at]

    def _value(self, *, tell: bool = False) -> Generator[None, None, str]:
        """Read a JSON value and return its text. With ``tell``, each piece of it becomes a delta."""
        raw, steps, over = "", self._whole_value(), None
        while True:
            start = self._at
            try:
                over = next(steps, True)
            finally:
                piece = self._text[start : self._at]
                if tell and piece:
                    self._deltas.append(Arguments(piece))
                    self._told = self._at
            raw += piece
            if over:
                return raw
            yield

    def _whole_value(self) -> Generator[None]:
        """Read a JSON value. Brackets and quotes are checked, but not every comma."""
        closers: list[str] = []
        while True:
            while self._at == len(self._text):
                yield
            start, character = self._at, self._text[self._at]
            if character == '"':
                yield from self._string()
            elif character in _CLOSERS:
                closers.append(_CLOSERS[character])
                self._at += 1
            elif closers and character == closers[-1]:
                closers.pop()
                self._at += 1
            else:
                ended = self._skip(_PLAIN if closers else _SCALAR)
                if self._at == start:
                    raise _NoCallError
                while ended and not closers:
                    yield
                    ended = self._skip(_SCALAR)
            if not closers:
                return

    def _string(self) -> Generator[None]:
        self._at += 1
        while True:
            while self._skip(_IN_STRING):
                yield
            self._at += 1
            if self._text[self._at - 1] == '"':
                return
            while self._at == len(self._text):
                yield
            self._at += 1  # the character after a backslash

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Skip the text that matches ``pattern``, which may be empty. Return whether the text ends there."""
        if (found := pattern.match(self._text, self._at)) is not None:
            self._at = found.end()
        return self._at == len(self._text)


def _decoded(raw: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _as_object(raw: str) -> str | None:
    """Return the arguments in ``raw``: an object, an object written in a string, or nothing. None: it is neither."""
    value = _decoded(raw)
    if isinstance(value, str):
        raw, value = value, _decoded(value)
    if value is None and raw.strip() == "null":
        return "{}"
    return raw if isinstance(value, dict) else None
