"""Counter-based noise: a pure function of (seed, sample index, position, token id or block of tokens).

Whatever batch, slot, device or worker a sequence runs on, and after a resumption, a token's noise is the same: integer
hashing is exact everywhere, only the last step to floating point may differ in the last bit. ``triton_noise`` is the
same for the GPU.
"""

import numpy as np
import torch

# Tokens that are drawn together as one: first a block of the vocabulary is drawn, then a token of it. Part of what a
# seed means, so another size gives other tokens.
NOISE_BLOCK = 1024

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN_2, _GOLDEN_3 = np.uint64(2 * 0x9E3779B97F4A7C15 % 2**64), np.uint64(3 * 0x9E3779B97F4A7C15 % 2**64)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
# Odd constants with well spread bits, as torch's int32 wants them.
TOKEN_STRIDE = 0x9E3779B1 - 2**32
ROUND_1 = (0x7FEB352D, 0x846CA68B - 2**32)
ROUND_2 = (0x21F0AAAD, 0xD35A2D97 - 2**32)
# From 31 bits to (0, 1). A hair less than 2**-31, or the largest numbers would be rounded up to 1, whose noise of minus
# infinity rules out even a token that is certain.
UNIT = 2.0**-31 * (1 - 2.0**-24)

# At a lower temperature the noise is lost beside the logits anyway, and dividing by it would overflow.
COLDEST = np.float32(1e-6)
_SMALLEST = np.finfo(np.float32).tiny


def scales_of(temperatures: np.ndarray) -> np.ndarray:
    """What logits are multiplied with before noise is added to them: one over the temperature; 0 = greedy. Both are
    ``[n]`` float32."""
    # Not below the smallest normal number: the GPU takes less for 0.
    scales = np.maximum(1 / np.maximum(temperatures, COLDEST), _SMALLEST)
    return np.where(temperatures > 0, scales, np.float32(0))


def row_keys(seeds: np.ndarray, sample_indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """64 bits for each row, as ``[rows, 2]`` int32. The inputs are ``[rows]`` uint64."""
    return keys_at(stems(seeds, sample_indices), positions)


def stems(seeds: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
    """The part of the keys that a sequence's rows have in common, ``[n]`` uint64. The inputs are ``[n]`` uint64."""
    return _mix(_mix(seeds + _GOLDEN) ^ _mix(sample_indices + _GOLDEN_2))


def keys_at(stems: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``row_keys`` of rows at ``positions [rows]``, integers, of sequences with ``stems [rows]``."""
    key = _mix(stems ^ _mix(positions.astype(np.uint64) + _GOLDEN_3))
    return key.view(np.int32).reshape(-1, 2)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of the broadcast shape of ``keys[..., 0]`` and ``token_ids``.

    ``keys [..., 2]`` int32 as from ``row_keys``; ``token_ids`` int32. Adding it to logits and taking the largest draws
    from their softmax.
    """
    bits = token_ids * TOKEN_STRIDE + keys[..., 0]
    bits = _scramble_(bits, ROUND_1)
    bits = _scramble_(bits.bitwise_xor_(keys[..., 1]), ROUND_2)
    # 31 bits, uniform within (0, 1) and finest near 0, which is where the largest noise comes from.
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(UNIT)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def block_gumbel(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The noise of blocks 0 to ``count``, ``[rows, count]``, for ``keys [rows, 2]``.

    Blocks are numbered from -1 downwards in the stream of the token ids, so that no block shares noise with a token.
    """
    return gumbel(keys.unsqueeze(1), torch.arange(-1, -1 - count, -1, dtype=torch.int32, device=keys.device))


def _scramble_(bits: torch.Tensor, multipliers: tuple[int, int]) -> torch.Tensor:
    """A bijection of 32 bits in which every input bit moves every output bit; shifts are logical."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= multipliers[0]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= multipliers[1]
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits in which every input bit moves every output bit."""
    values = (values ^ (values >> _SHIFT_1)) * _MIX_1
    values = (values ^ (values >> _SHIFT_2)) * _MIX_2
    scrambled: np.ndarray = values ^ (values >> _SHIFT_3)
    return scrambled
