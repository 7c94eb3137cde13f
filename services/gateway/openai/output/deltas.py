"""The deltas of an answer: pieces of content, reasoning and tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Content(NamedTuple):
    """A piece of the text for the user."""

    text: str


class ReasoningDelta(NamedTuple):
    """A piece of the model's reasoning."""

    text: str


class CallBegun(NamedTuple):
    """The beginning of a tool call. The ``Arguments`` up to the next call belong to it."""

    name: str


class Arguments(NamedTuple):
    """A piece of the JSON of a call's arguments, as the model wrote it."""

    text: str


Delta = Content | ReasoningDelta | CallBegun | Arguments


@dataclass
class ToolCall:
    """A whole tool call."""

    name: str
    arguments: str = ""


@dataclass
class Parts:
    """The parts of a whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Return ``deltas`` with neighbours of one kind joined, and without empty ones."""
    joined: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, CallBegun):
            joined.append(delta)
        elif joined and type(joined[-1]) is type(delta):
            joined[-1] = type(delta)(joined[-1].text + delta.text)
        elif delta.text:
            joined.append(delta)
    return joined


def parts_of(deltas: Iterable[Delta]) -> Parts:
    """Return the answer that consists of ``deltas``."""
    parts = Parts()
    for delta in merged(deltas):
        match delta:
            case Content(text):
                parts.content += text
            case ReasoningDelta(text):
                parts.reasoning += text
            case CallBegun(name):
                parts.calls.append(ToolCall(name))
            case Arguments(text):
                parts.calls[-1].arguments += text
    return parts
