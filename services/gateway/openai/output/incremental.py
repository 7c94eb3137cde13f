"""Reading a text whose next words are not known yet."""

from collections.abc import Callable

from services.gateway.openai.output.deltas import Delta


class Incremental:
    """Reads in states: each works on what is pending, and gives what is new; None when it needs more."""

    def __init__(self, begin: Callable[[], list[Delta] | None]) -> None:
        """``begin``: the first state."""
        self._pending = ""  # not yet understood
        self._read = begin

    def push(self, text: str) -> list[Delta]:
        """Take the next words; tell what is certain."""
        self._pending += text
        deltas: list[Delta] = []
        while (told := self._read()) is not None:
            deltas += told
        return deltas
