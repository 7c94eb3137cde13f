"""Triton version of ``noise.py``, with the same hash. The logarithms may differ in the last bits."""

import triton
import triton.language as tl

from services.worker.step import noise

_STRIDE = tl.constexpr(noise.TOKEN_STRIDE % 2**32)
_ROUND_1A, _ROUND_1B = (tl.constexpr(value % 2**32) for value in noise.ROUND_1)
_ROUND_2A, _ROUND_2B = (tl.constexpr(value % 2**32) for value in noise.ROUND_2)
_UNIT = tl.constexpr(noise.UNIT)


@triton.jit
def gumbel(key_low, key_high, ids):
    """Return standard Gumbel noise, float32, for ``ids`` int32 and two int32 scalar keys."""
    bits = ids.to(tl.uint32) * _STRIDE + key_low.to(tl.uint32)
    bits = _scramble(bits, _ROUND_1A, _ROUND_1B)
    bits = _scramble(bits ^ key_high.to(tl.uint32), _ROUND_2A, _ROUND_2B)
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _UNIT
    # Computes log1p(-uniform). A factor corrects the rounding error of 1 - uniform.
    rest = 1.0 - uniform
    exact = rest == 1.0
    exponential = tl.where(exact, uniform, tl.log(rest) * uniform / tl.where(exact, 1.0, rest - 1.0))
    return -tl.log(exponential)


@triton.jit
def _scramble(bits, first: tl.constexpr, second: tl.constexpr):
    bits ^= bits >> 16
    bits *= first
    bits ^= bits >> 15
    bits *= second
    return bits ^ (bits >> 16)
