"""The parts of a worker's memory that a sleep gives back."""

from collections.abc import Iterable
from enum import IntEnum
from typing import cast

from services.common.errors import InvalidRequest
from tokasaurus.common.v1 import memory_pb2


class MemoryPart(IntEnum):
    """A part of a worker's memory. Numbered as in the contracts."""

    WEIGHTS = 1
    KV_CACHE = 2


Parts = frozenset[MemoryPart]
ALL_PARTS: Parts = frozenset(MemoryPart)
SLEEP_LEVELS = 1, 2  # 1: the host keeps a copy of the weights. 2: the weights are dropped


def read_parts(numbers: Iterable[int]) -> Parts:
    """Return the parts with ``numbers``, or all parts if there are no numbers. Raises ``InvalidRequest``."""
    try:
        return frozenset(map(MemoryPart, numbers)) or ALL_PARTS
    except ValueError as error:
        names = ", ".join(f"MEMORY_PART_{each.name} ({each.value})" for each in MemoryPart)
        raise InvalidRequest(f"{error}; expected {names}", field="parts") from None


def write_parts(parts: Parts) -> list[memory_pb2.MemoryPart]:
    """Return the numbers of ``parts`` in the contracts, ascending."""
    return [cast("memory_pb2.MemoryPart", each.value) for each in sorted(parts)]


def part_names(parts: Iterable[MemoryPart]) -> list[str]:
    """Return the names of ``parts`` in lower case, without repetition, in the order of their numbers."""
    return [part.name.lower() for part in sorted(set(parts))]


def check_level(level: int) -> None:
    """Raise ``InvalidRequest`` unless ``level`` is a level of sleep."""
    if level not in SLEEP_LEVELS:
        raise InvalidRequest(
            f"level is {level}: expected 1, to keep a copy of the weights in host memory, or 2, to drop them",
            field="level",
        )
