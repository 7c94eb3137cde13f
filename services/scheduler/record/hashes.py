"""Hashes of all tokens up to each position. Prefixes with the same hash are assumed to be equal."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

FACTOR = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2**64
_MODULUS = 1 << 64


def prefix_hashes(tokens: np.ndarray) -> npt.NDArray[np.uint64]:
    """Return uint64 ``[tokens]``: entry i is entry i - 1 times ``FACTOR``, plus token i, plus 1, modulo 2**64."""
    rising, falling = _powers(1 << len(tokens).bit_length())
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * falling[: len(tokens)]
    return np.cumsum(terms, dtype=np.uint64) * rising[: len(tokens)]


def next_hashes(hashes: npt.NDArray[np.uint64], tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Return the hashes after one more token each: uint64."""
    return hashes * np.uint64(FACTOR) + tokens + np.uint64(1)


@lru_cache(maxsize=32)
def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the powers 0 to ``count`` - 1 of ``FACTOR`` and of its inverse: uint64 ``[count]`` each."""
    exponents = []
    for base in (FACTOR, pow(FACTOR, -1, _MODULUS)):
        factors = np.full(count, base, np.uint64)
        factors[0] = 1
        exponents.append(np.cumprod(factors, dtype=np.uint64))
    return exponents[0], exponents[1]
