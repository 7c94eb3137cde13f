"""Reads the integers and scales of the blocks of a GGUF file, without converting them to floats.

The layouts are those of ggml (``ggml-common.h``): a scale and, for some types, an offset in float16, then fifth bits,
and then the lower four bits of the integers. Byte ``i`` of a group of 32 has those of value ``i`` in its low half, and
those of value ``i + 16`` in its high half. In K quants, 256 values have a scale and a minimum in float16, and each
group of 32 has integer factors of both. There, the halves of byte ``i`` belong to neighbouring groups.
"""

from collections.abc import Callable

import torch

from services.common.model.gguf_file import BLOCK_TYPES
from services.common.model.quantized.gguf import GROUP, SCHEMES
from services.worker.layers.grouped import unpacked
from services.worker.layers.quantized_weight import QuantizedWeight

# Integers ``[blocks, values]`` int8 or uint8, and scales and offsets ``[blocks, groups]`` float32; None = no offsets.
_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def read_blocks(content: torch.Tensor, kind: str, columns: int) -> QuantizedWeight:
    """Return the weight ``[rows, columns]`` in ``content [bytes]`` uint8, whole blocks of a type of integers."""
    codes, scales, offsets = _READERS[kind](content.view(-1, _BYTES[kind]))
    rows = codes.numel() // columns
    return QuantizedWeight(
        SCHEMES[kind],
        codes.reshape(rows, columns),
        scales.reshape(rows, -1),
        None,
        offsets=None if offsets is None else offsets.reshape(rows, -1),
    )


def _float16(content: torch.Tensor) -> torch.Tensor:
    """Return the float16 values of ``[blocks, bytes]`` uint8 as float32."""
    return content.contiguous().view(torch.float16).float()


def _fifth_bits(content: torch.Tensor) -> torch.Tensor:
    """Return the fifth bits of a group, in their place, ``[blocks, 32]`` uint8, of ``[blocks, 4]``."""
    return (content.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> _Read:
    return unpacked(blocks[:, 2:], GROUP).to(torch.int8) - 8, _float16(blocks[:, :2]), None


def _q4_1(blocks: torch.Tensor) -> _Read:
    return unpacked(blocks[:, 4:], GROUP), _float16(blocks[:, :2]), _float16(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> _Read:
    codes = unpacked(blocks[:, 6:], GROUP) | _fifth_bits(blocks[:, 2:6])
    return codes.to(torch.int8) - 16, _float16(blocks[:, :2]), None


def _q5_1(blocks: torch.Tensor) -> _Read:
    codes = unpacked(blocks[:, 8:], GROUP) | _fifth_bits(blocks[:, 4:8])
    return codes, _float16(blocks[:, :2]), _float16(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> _Read:
    return blocks[:, 2:].contiguous().view(torch.int8), _float16(blocks[:, :2]), None


def _q4_k(blocks: torch.Tensor) -> _Read:
    return unpacked(blocks[:, 16:], 2 * GROUP), *_two_levels(blocks)


def _q5_k(blocks: torch.Tensor) -> _Read:
    # Bit ``group`` of byte ``value`` is the fifth bit of that value in the group.
    groups = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> groups & 1) << 4
    return unpacked(blocks[:, 48:], 2 * GROUP) | fifth.flatten(1), *_two_levels(blocks)


def _two_levels(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets of the groups of K quants, ``[blocks, 8]`` float32. Factors have six bits."""
    first, second, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return _float16(blocks[:, :2]) * scales.float(), -(_float16(blocks[:, 2:4]) * minima.float())


_READERS: dict[str, Callable[[torch.Tensor], _Read]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
_BYTES = {each.name: each.nbytes for each in BLOCK_TYPES.values()}  # of a block
