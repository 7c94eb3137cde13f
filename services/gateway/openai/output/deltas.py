"""What is new in an answer, once it is known what a model's text means."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Content(NamedTuple):
    """Words for the user."""

    text: str


class Reasoning(NamedTuple):
    """Words of the model to itself."""

    text: str


class CallBegun(NamedTuple):
    """A tool is called; ``Arguments`` up to the next one are its."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments' JSON, as the model wrote it."""

    text: str


Delta = Content | Reasoning | CallBegun | Arguments


@dataclass
class ToolCall:
    """A whole one."""

    name: str
    arguments: str = ""


@dataclass
class Parts:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbours of one kind joined, and without empty ones."""
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
    """The answer that ``deltas`` make together."""
    parts = Parts()
    for delta in merged(deltas):
        match delta:
            case Content(text):
                parts.content += text
            case Reasoning(text):
                parts.reasoning += text
            case CallBegun(name):
                parts.calls.append(ToolCall(name))
            case Arguments(text):
                parts.calls[-1].arguments += text
    return parts
