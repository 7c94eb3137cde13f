"""Marks in prompts, which identify the request of a text."""

import re
from random import Random

_MARK = re.compile(rb"qzx([0-9a-f]{8})")


def canary(number: int) -> str:
    """Return the mark of request ``number``."""
    return f"qzx{number:08x}"


def marks(data: bytes) -> set[bytes]:
    """Return the complete marks in ``data``."""
    return set(_MARK.findall(data))


def random_of(seed: int, surface: str, number: int) -> Random:
    """Return the random generator of request ``number``."""
    return Random(f"{seed} {surface} {number}")
