"""Load targets of linear layers that store several tensors of a checkpoint as one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import torch

T = TypeVar("T")


def part_targets(
    names: Sequence[str], weights: Iterable[T], bias: torch.Tensor | None, outputs: Sequence[int]
) -> dict[str, torch.Tensor | T]:
    """Return load targets by checkpoint name: ``weights``, one for each of ``names``, and the parts of ``bias``.

    ``names`` are the prefixes of the parts, and ``outputs`` their numbers of rows.
    """
    targets: dict[str, torch.Tensor | T] = dict(zip((f"{name}.weight" for name in names), weights, strict=True))
    if bias is not None:
        targets |= zip((f"{name}.bias" for name in names), bias.split(list(outputs)), strict=True)
    return targets


def spans(outputs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each part."""
    yield from zip(accumulate(outputs, initial=0), outputs, strict=False)
