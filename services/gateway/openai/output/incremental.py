"""The base class of parsers that read a text while it arrives."""

from collections.abc import Callable

from services.gateway.openai.output.deltas import Delta


class Incremental:
    """A state machine. A state returns the deltas that it finds in the pending text, or None if it needs more text."""

    def __init__(self, begin: Callable[[], list[Delta] | None]) -> None:
        """Create the parser in the state ``begin``."""
        self._pending = ""  # text whose meaning is not known yet
        self._read = begin

    def push(self, text: str) -> list[Delta]:
        """Add text, and return the deltas whose meaning is known."""
        self._pending += text
        deltas: list[Delta] = []
        while (found := self._read()) is not None:
            deltas += found
        return deltas
