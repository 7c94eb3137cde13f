"""Values of MXFP4: floats of 4 bits (E2M1) whose groups of 32 share an exponent (E8M0), as in gpt-oss."""

from itertools import pairwise

import torch

from services.common.model.quantized.tensors import MXFP4_BLOCK

_BIAS = 127  # of a stored exponent
_SIGNIFICAND_BITS = 23  # of float32
_NOT_FINITE = 255  # stored exponent of a group with values that are not finite
# The positive values in the order of their codes. A code of at least 8 is negative.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_OF_LARGEST = 2


def to_mxfp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``rows [rows, inputs]`` of any float dtype to the nearest values. Values of MXFP4 do not change.

    Returns codes ``[rows, inputs]`` and exponents ``[rows, groups]`` uint8. A value that is not finite makes its group
    NaN or infinite.
    """
    groups = rows.float().unflatten(1, (-1, MXFP4_BLOCK))
    largest = groups.abs().amax(dim=2)
    exponents = torch.frexp(largest).exponent - 1 - _EXPONENT_OF_LARGEST
    exponents = exponents.clamp_(1 - _BIAS, _BIAS)
    values = torch.ldexp(groups, -exponents.unsqueeze(2))
    bounds = torch.tensor([(low + high) / 2 for low, high in pairwise(_VALUES)])
    codes = torch.bucketize(values.abs().contiguous(), bounds.to(rows.device), out_int32=True).to(torch.uint8)
    codes.add_(values < 0, alpha=8)
    stored = torch.where(largest.isfinite(), exponents + _BIAS, _NOT_FINITE)
    return codes.flatten(1), stored.to(torch.uint8)


def from_mxfp4(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of ``codes`` float32, before they are multiplied by their scales."""
    return torch.tensor(_VALUES + tuple(-value for value in _VALUES), device=codes.device)[codes.int()]


def as_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return the scales of stored ``exponents``, float32, which has the same bias."""
    return (exponents.int() << _SIGNIFICAND_BITS).view(torch.float32)
