"""Reads quantized weights from the parts that store them."""

from collections.abc import Callable, Mapping

import torch

from services.common.errors import InvalidRequest
from services.common.model.quantized.scheme import Scheme
from services.common.model.quantized.tensors import CODES, MXFP4_BLOCK, ORDER, SCALES, SHAPE, ZEROS
from services.worker.layers.quantized_weight import QuantizedWeight

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word of AWQ, of its eight rows
_PLUS_ONE = {4: 0x11111111, 8: 0x01010101}  # added to a word of zeros, by bits
# Twice the values of the four bits of MXFP4, so that they are integers.
_TWICE_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E8M0_BIAS = 127


def read_weight(name: str, scheme: Scheme, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """Return the weight that ``parts``, by role, store. Their shapes and dtypes were checked.

    ``name`` is for errors. Raises ``InvalidRequest`` if the values of a part are out of range.
    """
    codes, scales, zeros = _READERS[scheme.layout](scheme, parts)
    if SHAPE in parts and (stored := parts[SHAPE].tolist()) != list(codes.shape):
        raise InvalidRequest(
            f"{name} has weight_shape={stored}, and its values {list(codes.shape)}; fetch the file again", field="model"
        )
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    zeros = None if zeros is None else zeros.reshape(scales.shape)
    return QuantizedWeight(scheme, codes, scales, zeros, _order(name, scheme, parts.get(ORDER), scales.shape[1]))


# Values, scales and zeros.
_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _plain(scheme: Scheme, parts: Mapping[str, torch.Tensor]) -> _Read:
    return parts[CODES], parts[SCALES].float(), parts.get(ZEROS)


def _packed(scheme: Scheme, parts: Mapping[str, torch.Tensor]) -> _Read:
    codes, scales = _unpacked(parts[CODES], scheme.bits), parts[SCALES].float()
    if ZEROS in parts:
        return codes, scales, _unpacked(parts[ZEROS].t(), scheme.bits).t()[: len(codes)]
    return codes, scales, torch.full_like(scales, 1 << (scheme.bits - 1))


def _gptq(scheme: Scheme, parts: Mapping[str, torch.Tensor]) -> _Read:
    codes = _unpacked(parts[CODES].t(), scheme.bits)
    # Format ``gptq`` stores zeros minus one. The sum carries between values, as the subtraction did.
    zeros = parts[ZEROS] + (_PLUS_ONE[scheme.bits] if scheme.layout == "gptq" else 0)
    return codes, parts[SCALES].float().t(), _unpacked(zeros, scheme.bits).t()[: len(codes)]


def _awq(scheme: Scheme, parts: Mapping[str, torch.Tensor]) -> _Read:
    return _awq_rows(parts[CODES]), parts[SCALES].float().t(), _awq_rows(parts[ZEROS])


_READERS: dict[str, Callable[[Scheme, Mapping[str, torch.Tensor]], _Read]] = {
    "plain": _plain,
    "packed": _packed,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
}


def read_experts(scheme: Scheme, codes: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """Return the weight of one expert in MXFP4, of ``[outputs, groups, 16]`` and ``[outputs, groups]`` uint8."""
    twice = torch.tensor(_TWICE_FP4, dtype=torch.int8)
    values = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(len(codes), -1, MXFP4_BLOCK).flatten(1)
    exponents = scales.view(torch.uint8).int() - (_E8M0_BIAS + 1)  # half the scale, for twice the values
    halves = torch.ldexp(torch.ones(exponents.shape), exponents)
    return QuantizedWeight(scheme, twice[values.int()], halves, None, None)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of ``words [rows, words]`` int32, lowest bits first, as ``[rows, values]`` uint8."""
    content = words.contiguous().view(torch.uint8)
    return content if bits == 8 else torch.stack((content & 15, content >> 4), dim=-1).flatten(1)


def _awq_rows(words: torch.Tensor) -> torch.Tensor:
    """Return the values of ``words [columns, words]`` int32 as ``[rows, columns]`` uint8."""
    words = words.t().contiguous()
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in _AWQ_PLACES], dim=1).flatten(0, 1)


def _order(name: str, scheme: Scheme, order: torch.Tensor | None, blocks: int) -> torch.Tensor | None:
    """Return the block of each column, or None if neighbours share a block.

    Raises ``InvalidRequest`` if ``order`` has a block that is absent.
    """
    if order is None or bool((order == -1).all()):  # not set
        return None
    least, most = int(order.min()), int(order.max())
    if least < 0 or most >= blocks:
        raise InvalidRequest(
            f"{name} has the groups {least} to {most} in its order of columns (g_idx); expected 0 to {blocks - 1};"
            " fetch the file again",
            field="model",
        )
    size = scheme.block[1] if scheme.block and blocks > 1 else len(order)
    return None if torch.equal(order.long(), torch.arange(len(order)) // size) else order.long()
