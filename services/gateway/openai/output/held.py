"""What must be held back of a text whose next words are not known yet."""

from collections.abc import Sequence


def first_of(markers: Sequence[str], text: str) -> tuple[int, str] | None:
    """Where the first marker begins in ``text``, and which it is."""
    found = [(where, marker) for marker in markers if (where := text.find(marker)) >= 0]
    return min(found) if found else None


def certain_length(markers: Sequence[str], text: str) -> int:
    """Characters of ``text`` that are neither the beginning of a marker nor white space before one."""
    end = min(len(text) - _overlap(marker, text) for marker in markers)
    return len(text[:end].rstrip())


def _overlap(marker: str, text: str) -> int:
    """Length of the longest tail of ``text`` that begins ``marker``."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
