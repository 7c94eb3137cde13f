"""Kernels of paged attention for CPUs. They read pages in place, and each key and value once per kv head.

They are compiled for one head size, group size and page size, so that inner loops have constant bounds and vectorise.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import torch

from services.worker.attention.attend_cpu import make_attend
from services.worker.layers.bfloat16_cpu import narrowed
from services.worker.layers.compiled_cpu import compile_function

# Queries and keys are views of one projection with any strides. With one token numpy reports them as contiguous.
_VIEW = numba.types.Array(numba.float32, 3, "A")
Storage = Literal["float32", "bfloat16"]
# The type of a stored key's elements. Numba has no bfloat16.
ELEMENTS: dict[Storage, Any] = {"float32": numba.float32, "bfloat16": numba.uint16}
_INDICES = numba.int64[::1]
_PAGE_TABLE = numba.int32[:, ::1]


class Kernels(NamedTuple):
    """Compiled ``store`` and ``attend``; see their definitions below for arguments and shapes."""

    store: Callable[..., None]
    attend: Callable[..., None]


@cache
def kernels(head_dim: int, group: int, page_size: int, storage: Storage = "float32") -> Kernels:
    """Return the kernels for keys and values in ``storage``. Queries are in float32.

    ``group`` is the number of query heads per kv head, and ``page_size`` is in tokens.
    """
    return Kernels(
        _make_store(head_dim, page_size, storage), make_attend(head_dim, group, page_size, ELEMENTS[storage])
    )


def pages_of(cache: torch.Tensor) -> np.ndarray:
    """Return ``cache`` as the kernels take it: float32, or uint16 for bfloat16."""
    array: np.ndarray = (cache if cache.dtype == torch.float32 else cache.view(torch.uint16)).numpy()
    return array


def first_tokens(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Return the first token that the last token of each context of ``lengths [tokens]`` int64 attends to."""
    return np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)


def _make_store(head_dim: int, page_size: int, storage: Storage) -> Callable[..., None]:
    element = ELEMENTS[storage]
    like = np.dtype(str(element)).type(0)

    def store(keys, values, key_pages, value_pages, slots, positions, page_table, first_head):
        """Store ``keys`` and ``values [tokens, heads, head_dim]``, as kv heads from ``first_head`` on, in pages."""
        for token in range(keys.shape[0]):
            page = page_table[slots[token], positions[token] // page_size]
            offset = positions[token] % page_size
            for head in range(keys.shape[1]):
                stored = first_head + head
                for i in range(head_dim):
                    key_pages[page, stored, offset, i] = narrowed(keys[token, head, i], like)
                    value_pages[page, stored, offset, i] = narrowed(values[token, head, i], like)

    signature = numba.void(_VIEW, _VIEW, *(element[:, :, :, ::1],) * 2, _INDICES, _INDICES, _PAGE_TABLE, numba.int64)
    return compile_function(store, signature)
