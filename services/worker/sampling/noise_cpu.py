"""Version of ``noise.py`` for compiled functions, with the same hash. The logarithms may differ in the last bits."""

from math import log, log1p

import numba
import numpy as np

from services.worker.step import noise

_STRIDE = np.uint64(noise.TOKEN_STRIDE % 2**32)
_ROUND_1A, _ROUND_1B = (np.uint64(value % 2**32) for value in noise.ROUND_1)
_ROUND_2A, _ROUND_2B = (np.uint64(value % 2**32) for value in noise.ROUND_2)
_UNIT = np.float32(noise.UNIT)
_MASK, _LOW_31 = np.uint64(0xFFFFFFFF), np.uint64(0x7FFFFFFF)


@numba.njit(nogil=True)
def gumbel(low, high, token):
    """Return standard Gumbel noise, float32, for a token or block. ``low`` and ``high`` are the key, uint32."""
    bits = (np.uint64(token) * _STRIDE + np.uint64(low)) & _MASK
    bits = _scramble(bits, _ROUND_1A, _ROUND_1B)
    bits = _scramble(bits ^ np.uint64(high), _ROUND_2A, _ROUND_2B)
    uniform = (np.float32(bits & _LOW_31) + np.float32(0.5)) * _UNIT
    return -log(-log1p(-uniform))


@numba.njit(nogil=True)
def _scramble(bits, first, second):
    bits ^= bits >> np.uint64(16)
    bits = (bits * first) & _MASK
    bits ^= bits >> np.uint64(15)
    bits = (bits * second) & _MASK
    return bits ^ (bits >> np.uint64(16))
