"""Counter-based noise: a pure function of (seed, sample index, position, token id or block of tokens).

The noise of a token does not depend on the batch, slot, device or worker, and is the same after a preemption. The
integer hash is exact on every device; only the conversion to floating point may differ, in the last bit.
``triton_noise`` computes the same noise on a GPU, and ``noise_cpu`` in compiled functions.
"""

import numpy as np
import torch

# Tokens in a block of the vocabulary: a block is drawn first, then a token of it. Another size would draw other tokens
# for the same seed.
NOISE_BLOCK = 1024

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN_2, _GOLDEN_3 = np.uint64(2 * 0x9E3779B97F4A7C15 % 2**64), np.uint64(3 * 0x9E3779B97F4A7C15 % 2**64)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
# Odd constants with well spread bits, as signed 32-bit values for torch's int32.
TOKEN_STRIDE = 0x9E3779B1 - 2**32
ROUND_1 = (0x7FEB352D, 0x846CA68B - 2**32)
ROUND_2 = (0x21F0AAAD, 0xD35A2D97 - 2**32)
# Scales 31 bits to (0, 1). Slightly less than 2**-31: otherwise the largest numbers would be rounded up to 1. Their
# noise would be minus infinity, which excludes even a token of probability 1.
UNIT = 2.0**-31 * (1 - 2.0**-24)

# Lowest temperature in use. Below it the noise has no effect on the choice, and dividing by it would overflow.
COLDEST = np.float32(1e-6)
_SMALLEST = np.finfo(np.float32).tiny


def scales_of(temperatures: np.ndarray) -> np.ndarray:
    """Return the factors of the logits before noise is added: one over the temperature, 0 for greedy rows.

    Both arrays are ``[n]`` float32.
    """
    # At least the smallest normal number: the GPU treats smaller numbers as 0.
    scales = np.maximum(1 / np.maximum(temperatures, COLDEST), _SMALLEST)
    return np.where(temperatures > 0, scales, np.float32(0))


def row_keys(seeds: np.ndarray, sample_indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a 64-bit key of the noise for each row, ``[rows, 2]`` int32. The inputs are ``[rows]`` uint64."""
    return keys_at(stems(seeds, sample_indices), positions)


def stems(seeds: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
    """Return the part of the keys that all positions of a sample share. All arrays are ``[n]`` uint64."""
    return _mix(_mix(seeds + _GOLDEN) ^ _mix(sample_indices + _GOLDEN_2))


def keys_at(stems: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the ``row_keys`` of rows with ``stems [rows]`` at ``positions [rows]``, of any integer dtype."""
    key = _mix(stems ^ _mix(positions.astype(np.uint64) + _GOLDEN_3))
    return key.view(np.int32).reshape(-1, 2)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32, of the broadcast shape of ``keys[..., 0]`` and ``token_ids``.

    ``keys [..., 2]`` int32 comes from ``row_keys``; ``token_ids`` is int32. The largest sum of logit and noise is a
    draw from the softmax of the logits.
    """
    bits = token_ids * TOKEN_STRIDE + keys[..., 0]
    bits = _scramble_(bits, ROUND_1)
    bits = _scramble_(bits.bitwise_xor_(keys[..., 1]), ROUND_2)
    # 31 bits, uniform in (0, 1). Floats are densest near 0, where the largest noise comes from.
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(UNIT)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def block_gumbel(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the noise of the first ``count`` blocks, ``[rows, count]`` float32, for ``keys [rows, 2]`` int32.

    Blocks take the token ids from -1 downwards, so that no block shares noise with a token.
    """
    return gumbel(keys.unsqueeze(1), torch.arange(-1, -1 - count, -1, dtype=torch.int32, device=keys.device))


def _scramble_(bits: torch.Tensor, multipliers: tuple[int, int]) -> torch.Tensor:
    """Permute 32-bit integers in place, such that each input bit changes every output bit. Shifts are logical."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= multipliers[0]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= multipliers[1]
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _mix(values: np.ndarray) -> np.ndarray:
    """Return a permutation of 64-bit integers in which each input bit changes every output bit."""
    values = (values ^ (values >> _SHIFT_1)) * _MIX_1
    values = (values ^ (values >> _SHIFT_2)) * _MIX_2
    scrambled: np.ndarray = values ^ (values >> _SHIFT_3)
    return scrambled
