"""Kernels of paged attention for CPUs. They read pages in place, and each key and value once per kv head.

They are compiled for one head size, group size and page size, so that inner loops have constant bounds and vectorise.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import torch

from services.worker.layers.bfloat16_cpu import narrowed, widened
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.prefetch_cpu import prefetch

# Queries and keys are views of one projection with any strides. With one token numpy reports them as contiguous.
_VIEW = numba.types.Array(numba.float32, 3, "A")
Storage = Literal["float32", "bfloat16"]
# The type of a stored key's elements. Numba has no bfloat16.
ELEMENTS: dict[Storage, Any] = {"float32": numba.float32, "bfloat16": numba.uint16}
_INDICES = numba.int64[::1]
_PAGE_TABLE = numba.int32[:, ::1]
_MATRIX = numba.float32[:, ::1]
_LINE = 64  # bytes of a cache line
_AHEAD = 12 << 10  # bytes between a read and what is prefetched meanwhile; with less, reads wait for memory
_LOG2_E = 1.4426950408889634


class Kernels(NamedTuple):
    """Compiled ``store`` and ``attend``; see their definitions below for arguments and shapes."""

    store: Callable[..., None]
    attend: Callable[..., None]


@cache
def kernels(head_dim: int, group: int, page_size: int, storage: Storage = "float32") -> Kernels:
    """Return the kernels for keys and values in ``storage``. Queries are in float32.

    ``group`` is the number of query heads per kv head, and ``page_size`` is in tokens.
    """
    return Kernels(_make_store(head_dim, page_size, storage), _make_attend(head_dim, group, page_size, storage))


def pages_of(cache: torch.Tensor) -> np.ndarray:
    """Return ``cache`` as the kernels take it: float32, or uint16 for bfloat16."""
    array: np.ndarray = (cache if cache.dtype == torch.float32 else cache.view(torch.uint16)).numpy()
    return array


def score_rows(group: int) -> int:
    """Return the number of rows of the workspace ``scores`` of ``attend``."""
    return 2 * group


def first_tokens(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Return the first token that the last token of each context of ``lengths [tokens]`` int64 attends to."""
    return np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)


def _make_store(head_dim: int, page_size: int, storage: Storage) -> Callable[..., None]:
    element = ELEMENTS[storage]
    like = np.dtype(str(element)).type(0)

    def store(keys, values, key_pages, value_pages, slots, positions, page_table):
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` in their pages."""
        for token in range(keys.shape[0]):
            page = page_table[slots[token], positions[token] // page_size]
            offset = positions[token] % page_size
            for head in range(keys.shape[1]):
                for i in range(head_dim):
                    key_pages[page, head, offset, i] = narrowed(keys[token, head, i], like)
                    value_pages[page, head, offset, i] = narrowed(values[token, head, i], like)

    signature = numba.void(_VIEW, _VIEW, *(element[:, :, :, ::1],) * 2, _INDICES, _INDICES, _PAGE_TABLE)
    return compile_function(store, signature, constants=(head_dim, page_size, element.bitwidth))


@numba.njit(nogil=True)
def _list_reads(key_pages, value_pages, slots, firsts, lengths, page_table, width, ahead):
    """Return the addresses of the pages that ``attend`` reads, in this order, for each head.

    ``width`` is that of a key in bytes. The last address is there ``ahead`` times more.
    """
    heads, page_size, total = key_pages.shape[1], key_pages.shape[2], 0
    for index in range(slots.shape[0]):
        total += (lengths[index] - 1) // page_size - firsts[index] // page_size + 1
    reads, count = np.empty(2 * heads * total + ahead, np.int64), 0
    for index in range(slots.shape[0]):
        places = page_table[slots[index], firsts[index] // page_size : (lengths[index] - 1) // page_size + 1]
        for head in range(heads):
            for start in (key_pages.ctypes.data, value_pages.ctypes.data):
                for page in places:
                    reads[count] = start + (np.int64(page) * heads + head) * page_size * width
                    count += 1
    reads[count:] = reads[count - 1]
    return reads


def _make_attend(head_dim: int, group: int, page_size: int, storage: Storage) -> Callable[..., None]:
    element = ELEMENTS[storage]
    line, width = _LINE, head_dim * element.bitwidth // 8  # of a key in bytes
    ahead = -(-_AHEAD // (page_size * width))  # pages
    # 2**f on [-0.5, 0.5], relative error below 1e-7.
    c1, c2, c3 = np.float32(0.693147182), np.float32(0.240226477), np.float32(0.0555032901)
    c4, c5, c6 = np.float32(0.00961837359), np.float32(0.00133998482), np.float32(0.000153707049)
    one, half, lowest, log2_e = np.float32(1), np.float32(0.5), np.float32(-120), np.float32(_LOG2_E)

    def attend(queries, key_pages, value_pages, tokens, slots, firsts, lengths, page_table, scale, scores, output):
        """Write ``output[tokens[i]]``, which attends to tokens ``firsts[i]`` to ``lengths[i] - 1`` of ``slots[i]``.

        ``queries [.., heads, head_dim]``; pages ``[pages, kv_heads, page_size, head_dim]``; ``scale`` of the products
        of queries and keys; ``scores [2 * group, max(lengths) or more]`` float32 workspace; ``output [.., heads *
        head_dim]``.
        """
        bits, query_scale = scores.view(np.int32), scale * log2_e
        reads = _list_reads(key_pages, value_pages, slots, firsts, lengths, page_table, width, ahead)
        read = 0
        query = np.empty((group, head_dim), np.float32)
        sums = np.empty((group, head_dim), np.float32)
        inverse = np.empty(group, np.float32)
        for index in range(tokens.shape[0]):
            token, slot, first, length = tokens[index], slots[index], firsts[index], lengths[index]
            begin = first // page_size * page_size
            for head in range(key_pages.shape[1]):
                for g in range(group):
                    for i in range(head_dim):
                        query[g, i] = queries[token, head * group + g, i] * query_scale
                        sums[g, i] = 0
                done = begin
                while done < length:
                    following = reads[read + ahead]
                    read += 1
                    page = page_table[slot, done // page_size]
                    for offset in range(max(first - done, 0), min(page_size, length - done)):
                        for i in range(0, width, line):
                            prefetch(following + offset * width + i)
                        for g in range(group):
                            score = np.float32(0)
                            for i in range(head_dim):
                                score += query[g, i] * widened(key_pages[page, head, offset, i])
                            scores[g, done + offset] = score
                    done += page_size
                for g in range(group):
                    largest = scores[g, first]
                    for t in range(first, length):
                        largest = max(largest, scores[g, t])
                    for t in range(first, length):
                        # 2**x = 2**round(x), from the exponent bits, times 2**f, from a polynomial.
                        x = max(scores[g, t] - largest, lowest)
                        whole = np.floor(x + half)
                        f = x - whole
                        power = ((((((c6 * f) + c5) * f + c4) * f + c3) * f + c2) * f + c1) * f + one
                        bits[group + g, t] = (np.int32(whole) + np.int32(127)) << np.int32(23)
                        scores[g, t] = power
                    total = np.float32(0)
                    for t in range(first, length):
                        weight = scores[g, t] * scores[group + g, t]
                        scores[g, t] = weight
                        total += weight
                    inverse[g] = one / total
                done = begin
                while done < length:
                    following = reads[read + ahead]
                    read += 1
                    page = page_table[slot, done // page_size]
                    for offset in range(max(first - done, 0), min(page_size, length - done)):
                        for i in range(0, width, line):
                            prefetch(following + offset * width + i)
                        for g in range(group):
                            weight = scores[g, done + offset]
                            for i in range(head_dim):
                                sums[g, i] += weight * widened(value_pages[page, head, offset, i])
                    done += page_size
                for g in range(group):
                    for i in range(head_dim):
                        output[token, (head * group + g) * head_dim + i] = sums[g, i] * inverse[g]

    pages = (element[:, :, :, ::1],) * 2
    signature = numba.void(_VIEW, *pages, *(_INDICES,) * 4, _PAGE_TABLE, numba.float32, _MATRIX, _MATRIX)
    return compile_function(attend, signature, constants=(head_dim, group, page_size, element.bitwidth))
