"""The base class of parsers that read a text while it arrives."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

from services.gateway.openai.output.deltas import Delta


class Incremental(ABC):
    """A parser that adds each delta to ``_deltas`` when its meaning is known."""

    def __init__(self) -> None:
        self._pending = ""  # text whose meaning is not known yet
        self._ended = False  # no more text will arrive
        self._deltas: list[Delta] = []
        self._steps = self._parse()

    @abstractmethod
    def _parse(self) -> Generator[None]:
        """Parse the pending text, and yield where more text is needed."""

    def push(self, text: str) -> list[Delta]:
        """Add text, and return the deltas whose meaning is known."""
        self._pending += text
        next(self._steps)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas of the rest of the answer."""
        self._ended = True
        return self.push("")

    def _take_all(self) -> str:
        """Take the pending text."""
        text, self._pending = self._pending, ""
        return text

    def _take_certain(self, markers: Sequence[str]) -> str:
        """Take the pending text, except a possible beginning of a marker at its end and white space before it."""
        end = min(len(self._pending) - _overlap(marker, self._pending) for marker in markers)
        text = self._pending[:end].rstrip()
        self._pending = self._pending[len(text) :]
        return text


def first_of(markers: Sequence[str], text: str) -> tuple[int, str] | None:
    """Return the index of the first marker in ``text``, and the marker, or None."""
    found = [(where, marker) for marker in markers if (where := text.find(marker)) >= 0]
    return min(found) if found else None


def _overlap(marker: str, text: str) -> int:
    """Return the length of the longest end of ``text`` with which ``marker`` begins."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
