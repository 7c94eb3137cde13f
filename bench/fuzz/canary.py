"""Marks in prompts: a text is known by its mark wherever it turns up."""

import re
from random import Random

_MARK = re.compile(rb"qzx([0-9a-f]{8})")


def canary(number: int) -> str:
    """Of request ``number``."""
    return f"qzx{number:08x}"


def marks(data: bytes) -> set[bytes]:
    """Those in ``data``, whole."""
    return set(_MARK.findall(data))


def random_of(seed: int, surface: str, number: int) -> Random:
    """What request ``number`` is made with."""
    return Random(f"{seed} {surface} {number}")
