"""Finds tool calls in the text of an answer, in the formats in which models write them."""

from collections.abc import Collection
from typing import NamedTuple

from services.gateway.openai.output.call import CallReader, ReadState
from services.gateway.openai.output.deltas import Arguments, Content, Delta
from services.gateway.openai.output.incremental import Incremental
from services.gateway.openai.output.markers import certain_length, first_of


class CallFormat(NamedTuple):
    """The form in which a model writes a call: a marker, ``{"name": ..., "arguments": ...}``, and an end marker."""

    name: str
    begins: tuple[str, ...]  # markers before a call
    ends: str  # marker after a call, which may be missing
    ends_visibly: bool  # the end marker does not occur in other text or in JSON
    any_name: bool  # every object after the marker is a call, even of a tool that was not offered


HERMES = CallFormat("hermes", ("<tool_call>",), "</tool_call>", True, True)
# An object is a call if it names a tool that was offered.
LLAMA3 = CallFormat("llama3", ("<|python_tag|>", "{"), ";", False, False)
CALL_FORMATS = {form.name: form for form in (HERMES, LLAMA3)}


class CallParser(Incremental):
    """Finds the calls in one answer. White space around a call is removed.

    Text that begins like a call and is none becomes content. A call that was returned stays a call: its arguments are
    returned as the model wrote them, even if they are not valid JSON.
    """

    def __init__(self, form: CallFormat, tools: Collection[str]) -> None:
        super().__init__(self._text)
        self._form = form
        self._tools = tools
        self._opening = ""  # marker before the JSON of a possible call
        self._unclosed = False  # the end marker of a call may follow
        self._call = self._new_call()

    @property
    def in_arguments(self) -> bool:
        """True if the text ends within the arguments of a call, or if the rest belongs to invalid arguments."""
        return self._read == self._spilt or (self._read == self._in_call and self._call.arguments_open)

    def finish(self) -> list[Delta]:
        """Return the deltas of the rest of the answer."""
        rest = self._pending
        if self._read == self._spilt:
            return [Arguments(rest)]
        if self._read == self._after:
            return []
        if self._read == self._in_call:
            rest = self._call.untold + rest
            if self._call.begun and not rest.strip():
                return []
        return [Content(self._opening + rest)]

    # The states. Each returns the deltas that it finds in the pending text, or None if it needs more text.

    def _text(self) -> list[Delta] | None:
        ends = (self._form.ends,) if self._unclosed else ()
        markers = (*self._form.begins, *ends)
        found = first_of(markers, self._pending)
        if found is None:
            length = certain_length(markers, self._pending)
            text, self._pending = self._pending[:length], self._pending[length:]
            return [Content(text)] if text else None
        where, marker = found
        words = self._pending[:where].rstrip()
        if marker in ends:
            self._pending, self._unclosed, self._read = self._pending[where + len(marker) :], False, self._after
            return [Content(words)]
        taken = where + (len(marker) if marker != "{" else 0)
        self._opening, self._pending = self._pending[len(words) : taken], self._pending[taken:]
        self._read = self._opened
        return [Content(words)]

    def _opened(self) -> list[Delta] | None:
        rest = self._pending.lstrip()
        if not rest:
            return None
        self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if rest[0] != "{":
            return self._no_call("")
        self._call, self._read = self._new_call(), self._in_call
        return []

    def _in_call(self) -> list[Delta] | None:
        if not self._pending:
            return None
        call = self._call
        end, state, deltas = call.take(self._pending, 0)
        self._pending = self._pending[end:]
        if call.begun:
            self._opening = ""
        if state is ReadState.DONE:
            self._read, self._unclosed = self._after, True
        elif state is ReadState.BROKEN and call.arguments_open:
            self._read = self._spilt
        elif state is ReadState.BROKEN:
            self._unclosed = call.begun and self._form.ends_visibly
            deltas += self._no_call(call.untold)
        return deltas

    def _spilt(self) -> list[Delta] | None:
        end = self._form.ends
        where = self._pending.find(end) if self._form.ends_visibly else -1
        if where >= 0:
            text, self._pending = self._pending[:where], self._pending[where:]
            self._read, self._unclosed = self._after, True
            return [Arguments(text.rstrip())]
        length = certain_length((end,), self._pending) if self._form.ends_visibly else len(self._pending)
        text, self._pending = self._pending[:length], self._pending[length:]
        return [Arguments(text)] if text else None

    def _after(self) -> list[Delta] | None:
        """Read the text directly after a call."""
        self._pending = rest = self._pending.lstrip()
        end = self._form.ends
        if self._unclosed and rest.startswith(end):
            self._pending, self._unclosed = rest[len(end) :], False
            return []
        if not rest or (self._unclosed and end.startswith(rest)):
            return None
        self._unclosed = self._unclosed and self._form.ends_visibly
        self._read = self._text
        return []

    def _no_call(self, untold: str) -> list[Delta]:
        text, self._opening = self._opening + untold, ""
        self._read = self._text
        return [Content(text)]

    def _new_call(self) -> CallReader:
        return CallReader((lambda name: True) if self._form.any_name else self._tools.__contains__)
