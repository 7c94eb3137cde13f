"""Search for markers in a text that is not complete."""

from collections.abc import Sequence


def first_of(markers: Sequence[str], text: str) -> tuple[int, str] | None:
    """Return the index of the first marker in ``text``, and the marker, or None."""
    found = [(where, marker) for marker in markers if (where := text.find(marker)) >= 0]
    return min(found) if found else None


def certain_length(markers: Sequence[str], text: str) -> int:
    """Return the length of ``text`` without a possible beginning of a marker at its end, and white space before it."""
    end = min(len(text) - _overlap(marker, text) for marker in markers)
    return len(text[:end].rstrip())


def _overlap(marker: str, text: str) -> int:
    """Return the length of the longest end of ``text`` with which ``marker`` begins."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
