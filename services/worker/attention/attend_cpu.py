"""The compiled function that attends to paged keys and values on a CPU.

Its inner loops are vector instructions that are written down, because numba turns few of them into vectors. Scores of
up to 16 tokens are computed together, so that their sums over the elements of a key take few instructions.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.described.memory import PANEL_COLUMNS
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.lanes_cpu import (
    FLOAT,
    INTEGER,
    LANES,
    LOG2_E,
    int64,
    load,
    multiply_add,
    reduce,
    shuffle,
    spread,
    weigh,
)
from services.worker.layers.prefetch_cpu import prefetch
from services.worker.layers.vectors_cpu import most_rows

# Queries are views of one projection with any strides. With one token numpy reports them as contiguous.
_VIEW = numba.types.Array(numba.float32, 3, "A")
_LINE = 64  # bytes of a cache line
_AHEAD = 12 << 10  # bytes between a read and what is prefetched meanwhile; with less, reads wait for memory


def make_attend(head_dim: int, group: int, page_size: int, element: Any) -> Callable[..., None]:
    """Return ``attend`` below for ``group`` query heads per kv head. ``element`` is the type of a stored element."""
    bytes_of, lanes, line = element.bitwidth // 8, gcd(head_dim, LANES), _LINE
    width = head_dim * bytes_of  # of a key in bytes
    ahead = -(-_AHEAD // (page_size * width))  # pages
    rows = _rows(head_dim, group)
    log2_e = np.float32(LOG2_E)

    def attend(
        queries, key_pages, value_pages, tokens, slots, firsts, lengths, page_table, scale, scores, output, first_head
    ):  # fmt: skip
        """Write ``output[tokens[i]]``, which attends to tokens ``firsts[i]`` to ``lengths[i] - 1`` of ``slots[i]``.

        ``queries [.., heads, head_dim]`` are those of the kv heads from ``first_head`` on; pages ``[pages, kv_heads,
        page_size, head_dim]``; ``scale`` of the products of queries and keys; ``scores`` from ``new_scores``; ``output
        [.., all heads * head_dim]``.
        """
        last_head = first_head + queries.shape[1] // group
        heads = range(first_head, last_head)
        reads = _list_reads(key_pages, value_pages, heads, slots, firsts, lengths, page_table, width, ahead)
        read = 0
        query, sums = np.empty((group, head_dim), np.float32), np.empty((group, head_dim), np.float32)
        totals = np.empty(group, np.float32)
        stride = scores.shape[1] * 4
        for index in range(tokens.shape[0]):
            token, first, length = tokens[index], firsts[index], lengths[index]
            begin = first // page_size * page_size
            for head in range(first_head, last_head):
                for g in range(group):
                    for i in range(head_dim):
                        query[g, i] = queries[token, (head - first_head) * group + g, i] * scale * log2_e
                        sums[g, i] = 0
                for start in range(begin, length, page_size):
                    page, following = reads[read], reads[read + ahead]
                    read += 1
                    offset, stop = max(first - start, 0), min(page_size, length - start)
                    for at in range(offset * width, stop * width, line):
                        prefetch(following + at)
                    while offset < stop:
                        step = lanes if offset + lanes <= stop else 1
                        key, target = page + offset * width, scores.ctypes.data + (start + offset) * 4
                        for g in range(0, group, rows):
                            source, place = query.ctypes.data + g * head_dim * 4, target + g * stride
                            if step == 1:
                                _score(1, rows, head_dim, bytes_of, source, key, place, stride)
                            else:
                                _score(lanes, rows, head_dim, bytes_of, source, key, place, stride)
                        offset += step
                for g in range(group):
                    scores[g, length : length + lanes] = -np.inf
                    vectors = (length - first + lanes - 1) // lanes
                    totals[g], _ = weigh(lanes, scores.ctypes.data + g * stride + first * 4, vectors)
                for start in range(begin, length, page_size):
                    page, following = reads[read], reads[read + ahead]
                    read += 1
                    offset, stop = max(first - start, 0), min(page_size, length - start)
                    for at in range(offset * width, stop * width, line):
                        prefetch(following + at)
                    value, weight = page + offset * width, scores.ctypes.data + (start + offset) * 4
                    for g in range(0, group, rows):
                        target, place = sums.ctypes.data + g * head_dim * 4, weight + g * stride
                        _add_values(rows, head_dim, bytes_of, place, stride, value, stop - offset, target)
                for g in range(group):
                    for i in range(head_dim):
                        output[token, (head * group + g) * head_dim + i] = sums[g, i] / totals[g]
        # Numba frees an array after its last use, and an address does not count as a use.
        return query.size + sums.size

    pages, indices, matrix = (element[:, :, :, ::1],) * 2, numba.int64[::1], numba.float32[:, ::1]
    signature = numba.int64(
        _VIEW, *pages, *(indices,) * 4, numba.int32[:, ::1], numba.float32, matrix, matrix, numba.int64
    )
    return compile_function(attend, signature)


@numba.njit(nogil=True)
def new_scores(group: int, longest: int) -> np.ndarray:
    """Return a workspace of ``attend`` for contexts of at most ``longest`` tokens."""
    return np.empty((group, longest + LANES), np.float32)


def _rows(head_dim: int, group: int) -> int:
    """Return how many query heads a vector function takes at once. It divides ``group``.

    Their sums fit into the registers of this processor, unless those of one head do not.
    """
    most = max(1, most_rows() * PANEL_COLUMNS // head_dim)
    return max(rows for rows in range(1, group + 1) if group % rows == 0 and rows <= most)


@numba.njit(nogil=True)
def _list_reads(key_pages, value_pages, heads, slots, firsts, lengths, page_table, width, ahead):
    """Return the addresses of the pages that ``attend`` reads, in this order, for each of the kv heads ``heads``.

    ``width`` is that of a key in bytes. The last address is there ``ahead`` times more.
    """
    kv_heads, page_size, total = key_pages.shape[1], key_pages.shape[2], 0
    for index in range(slots.shape[0]):
        total += (lengths[index] - 1) // page_size - firsts[index] // page_size + 1
    reads, count = np.empty(2 * len(heads) * total + ahead, np.int64), 0
    for index in range(slots.shape[0]):
        places = page_table[slots[index], firsts[index] // page_size : (lengths[index] - 1) // page_size + 1]
        for head in heads:
            for start in (key_pages.ctypes.data, value_pages.ctypes.data):
                for page in places:
                    reads[count] = start + (np.int64(page) * kv_heads + head) * page_size * width
                    count += 1
    reads[count:] = reads[count - 1]
    return reads


@intrinsic(prefer_literal=True)
def _score(typing, tokens, rows, head_dim, bytes_of, queries, keys, scores, stride):
    """Write the products of ``rows`` queries and ``tokens`` keys, one or the lanes of a vector.

    ``queries`` is the address of ``[rows, head_dim]`` float32, and ``keys`` that of ``[tokens, head_dim]`` elements of
    ``bytes_of`` bytes. ``scores`` is the address of the first product of the first row, and rows are ``stride`` bytes
    apart. A product does not depend on ``tokens``.
    """
    constants = tokens, rows, head_dim, bytes_of
    signature = types.void(*constants, *[types.intp] * 4)
    count, heads, size, element = (each.literal_value for each in constants)
    lanes = gcd(size, LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, key, target, distance = arguments[4:]
        parts = range(size // lanes)
        factors = [
            [load(builder, source, 4 * (row * size + part * lanes), lanes) for part in parts] for row in range(heads)
        ]
        # Partial sums of each row. Those of equally many tokens are added at once, so few registers hold them.
        pending: list[list[tuple[int, Any]]] = [[] for _ in range(heads)]
        for token in _order(lanes) if count > 1 else [0]:
            stored = [load(builder, key, element * (token * size + part * lanes), lanes, element) for part in parts]
            for row, sums in zip(factors, pending, strict=True):
                total = builder.fmul(row[0], stored[0])
                for part in parts[1:]:
                    total = multiply_add(builder, row[part], stored[part], total)
                sums.append((lanes // 2, total))
                while count > 1 and len(sums) > 1 and sums[-1][0] == sums[-2][0]:
                    (half, first), (_, second) = sums[-2:]
                    sums[-2:] = [(half // 2, _add_halves(builder, first, second, half))]
        for index, sums in enumerate(pending):
            place = builder.add(target, builder.mul(distance, int64(index)))
            total = sums[0][1]
            if count == 1:
                total = builder.extract_element(reduce(builder, total, builder.fadd), INTEGER(0))
            builder.store(total, builder.inttoptr(place, total.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def _add_values(typing, rows, head_dim, bytes_of, weights, stride, values, count, sums):
    """Add the weighted sums of ``count`` values to ``sums``, the address of ``[rows, head_dim]`` float32.

    ``weights`` is the address of the first weight of the first row, and rows are ``stride`` bytes apart. ``values`` is
    the address of ``[count, head_dim]`` elements of ``bytes_of`` bytes.
    """
    constants = rows, head_dim, bytes_of
    heads, size, element = (each.literal_value for each in constants)
    lanes = gcd(size, LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, distance, value, count, target = arguments[3:]
        floats = ir.VectorType(FLOAT, lanes)
        totals = [cgutils.alloca_once(builder, floats) for _ in range(heads * size // lanes)]
        for index, total in enumerate(totals):
            builder.store(load(builder, target, 4 * index * lanes, lanes), total)
        with cgutils.for_range(builder, count) as loop:
            source = builder.add(value, builder.mul(loop.index, int64(element * size)))
            stored = [load(builder, source, element * start, lanes, element) for start in range(0, size, lanes)]
            place = builder.add(weight, builder.mul(loop.index, int64(4)))
            for row in range(heads):
                address = builder.add(place, builder.mul(distance, int64(row)))
                single = builder.load(builder.inttoptr(address, FLOAT.as_pointer()), align=4)
                factor = spread(builder, single, lanes)
                for part, each in enumerate(stored):
                    total = totals[row * len(stored) + part]
                    builder.store(multiply_add(builder, factor, each, builder.load(total)), total)
        for index, total in enumerate(totals):
            place = builder.add(target, int64(4 * index * lanes))
            builder.store(builder.load(total), builder.inttoptr(place, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*constants, *[types.intp] * 5), generate


def _order(lanes: int) -> list[int]:
    """Return the order in which ``_score`` takes tokens, so that ``_add_halves`` leaves their sums in order."""

    def places(tokens: Sequence[int], half: int) -> list[int]:
        """Return the token of each lane, after sums of ``tokens`` were added down to blocks of ``half``."""
        if len(tokens) == 1:
            return [tokens[0]] * lanes
        middle = len(tokens) // 2
        both = places(tokens[:middle], 2 * half) + places(tokens[middle:], 2 * half)
        return [both[lane] for lane in _halves(lanes, half)]

    order = [0] * lanes
    for lane, turn in enumerate(places(range(lanes), 1)):
        order[turn] = lane
    return order


def _halves(lanes: int, half: int) -> list[int]:
    """Return the lanes of two vectors, one behind the other, that are first halves of blocks of ``2 * half`` lanes.

    Small blocks alternate within four lanes, since an instruction moves values within them faster.
    """
    span = lanes if half >= 4 else min(4, lanes)
    return [
        vector + start + block + lane
        for start in range(0, lanes, span)
        for vector in (0, lanes)
        for block in range(0, span, 2 * half)
        for lane in range(half)
    ]


def _add_halves(builder: Any, first: Any, second: Any, half: int) -> Any:
    """Return a vector of the sums of both halves of each block of ``2 * half`` lanes, of two vectors."""
    lanes = _halves(first.type.count, half)
    halves = (shuffle(builder, first, second, [lane + shift for lane in lanes]) for shift in (0, half))
    return builder.fadd(*halves)
