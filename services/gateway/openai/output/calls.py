"""Finds tool calls in the text of an answer, in the formats in which models write them."""

from collections.abc import Collection, Generator
from typing import NamedTuple

from services.gateway.openai.output.call import CallReader, ReadState
from services.gateway.openai.output.deltas import Arguments, Content
from services.gateway.openai.output.incremental import Incremental, first_of


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
        super().__init__()
        self._form = form
        self._tools = tools
        self._unclosed = False  # the end marker of a call may follow
        self._call = self._new_call()

    @property
    def in_arguments(self) -> bool:
        """True if the text ends within the arguments of a call, or if the rest belongs to invalid arguments."""
        return self._call.arguments_open

    def _parse(self) -> Generator[None]:
        while True:
            ends = (self._form.ends,) if self._unclosed else ()
            markers = (*self._form.begins, *ends)
            if (found := first_of(markers, self._pending)) is None:
                if text := self._take_all() if self._ended else self._take_certain(markers):
                    self._deltas.append(Content(text))
                yield
                continue
            where, marker = found
            words = self._pending[:where].rstrip()
            self._deltas.append(Content(words))
            if marker in ends:
                self._pending, self._unclosed = self._pending[where + len(marker) :], False
            else:
                taken = where + (len(marker) if marker != "{" else 0)
                opening, self._pending = self._pending[len(words) : taken], self._pending[taken:]
                if not (yield from self._possible_call(opening)):
                    continue
            yield from self._after()

    def _possible_call(self, opening: str) -> Generator[None, None, bool]:
        """Read what may be a call, after its marker ``opening``. Return False if it is none, and becomes content."""
        while not (rest := self._pending.lstrip()):
            if self._ended:
                self._deltas.append(Content(opening + self._take_all()))
            yield
        opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if rest[0] != "{":
            self._deltas.append(Content(opening))
            return False
        self._call = call = self._new_call()
        state = ReadState.READING
        while state is ReadState.READING:
            end, state, deltas = call.take(self._pending, 0)
            self._pending = self._pending[end:]
            self._deltas += deltas
            if call.begun:
                opening = ""
            if state is ReadState.READING:
                yield
                if self._ended and (not call.begun or call.untold.strip()):
                    self._deltas.append(Content(opening + call.untold))
        if state is ReadState.BROKEN and not call.arguments_open:
            self._unclosed = call.begun and self._form.ends_visibly
            self._deltas.append(Content(opening + call.untold))
            return False
        if state is ReadState.BROKEN:
            yield from self._invalid_arguments()
        self._unclosed = True
        return True

    def _invalid_arguments(self) -> Generator[None]:
        """Read the rest of arguments that are not valid JSON, up to the end marker if that is visible."""
        end, visible = self._form.ends, self._form.ends_visibly
        while not visible or end not in self._pending:
            if text := self._take_certain((end,)) if visible and not self._ended else self._take_all():
                self._deltas.append(Arguments(text))
            yield
        where = self._pending.find(end)
        self._deltas.append(Arguments(self._pending[:where].rstrip()))
        self._pending, self._call.arguments_open = self._pending[where:], False

    def _after(self) -> Generator[None]:
        """Skip the end marker and white space after a call."""
        end = self._form.ends
        while True:
            self._pending = rest = self._pending.lstrip()
            if self._unclosed and rest.startswith(end):
                self._pending, self._unclosed = rest[len(end) :], False
            elif rest and not (self._unclosed and end.startswith(rest)):
                break
            else:
                yield
        self._unclosed = self._unclosed and self._form.ends_visibly

    def _new_call(self) -> CallReader:
        return CallReader((lambda name: True) if self._form.any_name else self._tools.__contains__)
