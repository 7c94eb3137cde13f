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
from services.worker.layers.prefetch_cpu import prefetch
from services.worker.layers.vectors_cpu import most_rows

# Queries are views of one projection with any strides. With one token numpy reports them as contiguous.
_VIEW = numba.types.Array(numba.float32, 3, "A")
_LINE = 64  # bytes of a cache line
_AHEAD = 12 << 10  # bytes between a read and what is prefetched meanwhile; with less, reads wait for memory
_LOG2_E = 1.4426950408889634
_LANES = 16  # values of a vector
_FLOAT, _SHORT, _INTEGER = ir.FloatType(), ir.IntType(16), ir.IntType(32)
# 2**f on [-0.5, 0.5], relative error below 1e-7, from the highest power.
_POWERS = (0.000153707049, 0.00133998482, 0.00961837359, 0.0555032901, 0.240226477, 0.693147182, 1.0)
_LOWEST = -120.0  # smaller exponents of 2 count as this one
_ROUNDS = 1.5 * 2**23  # a small float32 plus this number has the rounded value in its lowest bits
_EXPONENT_BIAS, _FRACTION_BITS = 127, 23  # of float32


def make_attend(head_dim: int, group: int, page_size: int, element: Any) -> Callable[..., None]:
    """Return ``attend`` below for ``group`` query heads per kv head. ``element`` is the type of a stored element."""
    bytes_of, lanes, line = element.bitwidth // 8, gcd(head_dim, _LANES), _LINE
    width = head_dim * bytes_of  # of a key in bytes
    ahead = -(-_AHEAD // (page_size * width))  # pages
    rows = _rows(head_dim, group)
    log2_e = np.float32(_LOG2_E)

    def attend(queries, key_pages, value_pages, tokens, slots, firsts, lengths, page_table, scale, scores, output):
        """Write ``output[tokens[i]]``, which attends to tokens ``firsts[i]`` to ``lengths[i] - 1`` of ``slots[i]``.

        ``queries [.., heads, head_dim]``; pages ``[pages, kv_heads, page_size, head_dim]``; ``scale`` of the products
        of queries and keys; ``scores`` from ``new_scores``; ``output [.., heads * head_dim]``.
        """
        reads = _list_reads(key_pages, value_pages, slots, firsts, lengths, page_table, width, ahead)
        read = 0
        query, sums = np.empty((group, head_dim), np.float32), np.empty((group, head_dim), np.float32)
        totals = np.empty(group, np.float32)
        stride = scores.shape[1] * 4
        for index in range(tokens.shape[0]):
            token, first, length = tokens[index], firsts[index], lengths[index]
            begin = first // page_size * page_size
            for head in range(key_pages.shape[1]):
                for g in range(group):
                    for i in range(head_dim):
                        query[g, i] = queries[token, head * group + g, i] * scale * log2_e
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
                    totals[g] = _weigh(lanes, scores.ctypes.data + g * stride + first * 4, vectors)
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
    signature = numba.int64(_VIEW, *pages, *(indices,) * 4, numba.int32[:, ::1], numba.float32, matrix, matrix)
    return compile_function(attend, signature, constants=(head_dim, group, page_size, element.bitwidth))


def new_scores(group: int, longest: int) -> np.ndarray:
    """Return a workspace of ``attend`` for contexts of at most ``longest`` tokens."""
    return np.empty((group, longest + _LANES), np.float32)


def _rows(head_dim: int, group: int) -> int:
    """Return how many query heads a vector function takes at once. It divides ``group``.

    Their sums fit into the registers of this processor, unless those of one head do not.
    """
    most = max(1, most_rows() * PANEL_COLUMNS // head_dim)
    return max(rows for rows in range(1, group + 1) if group % rows == 0 and rows <= most)


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
    lanes = gcd(size, _LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, key, target, distance = arguments[4:]
        parts = range(size // lanes)
        factors = [
            [_load(builder, source, 4 * (row * size + part * lanes), lanes) for part in parts] for row in range(heads)
        ]
        # Partial sums of each row. Those of equally many tokens are added at once, so few registers hold them.
        pending: list[list[tuple[int, Any]]] = [[] for _ in range(heads)]
        for token in _order(lanes) if count > 1 else [0]:
            stored = [_load(builder, key, element * (token * size + part * lanes), lanes, element) for part in parts]
            for row, sums in zip(factors, pending, strict=True):
                total = builder.fmul(row[0], stored[0])
                for part in parts[1:]:
                    total = _multiply_add(builder, row[part], stored[part], total)
                sums.append((lanes // 2, total))
                while count > 1 and len(sums) > 1 and sums[-1][0] == sums[-2][0]:
                    (half, first), (_, second) = sums[-2:]
                    sums[-2:] = [(half // 2, _add_halves(builder, first, second, half))]
        for index, sums in enumerate(pending):
            place = builder.add(target, builder.mul(distance, _size(index)))
            total = sums[0][1]
            if count == 1:
                total = builder.extract_element(_reduce(builder, total, builder.fadd), _INTEGER(0))
            builder.store(total, builder.inttoptr(place, total.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def _weigh(typing, lanes, scores, vectors):
    """Replace each score ``s`` by ``2**(s - m)``, where ``m`` is the largest, and return the sum.

    ``scores`` is the address of ``vectors`` times ``lanes`` float32. A score of -inf adds almost nothing.
    """
    count = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, vectors = arguments
        floats, integers = ir.VectorType(_FLOAT, count), ir.VectorType(_INTEGER, count)

        def of(value: float) -> Any:
            return ir.Constant(floats, [float(np.float32(value))] * count)

        def larger(first: Any, second: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", first, second), first, second)

        largest, total = cgutils.alloca_once(builder, floats), cgutils.alloca_once(builder, floats)
        builder.store(of(-np.inf), largest)
        builder.store(of(0), total)
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.add(start, builder.mul(loop.index, _size(4 * count)))
            builder.store(larger(_load(builder, place, 0, count), builder.load(largest)), largest)
        most = _reduce(builder, builder.load(largest), larger)
        kind = ir.FunctionType(floats, [floats])
        rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{count}f32")
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.add(start, builder.mul(loop.index, _size(4 * count)))
            # 2**x = 2**round(x), from the exponent bits, times 2**f, from a polynomial. A NaN stays one.
            x = builder.fsub(_load(builder, place, 0, count), most)
            x = builder.select(builder.fcmp_ordered("<", x, of(_LOWEST)), of(_LOWEST), x)
            f = builder.fsub(x, builder.call(rint, [x]))
            power = of(_POWERS[0])
            for coefficient in _POWERS[1:]:
                power = _multiply_add(builder, power, f, of(coefficient))
            whole = builder.bitcast(builder.fadd(x, of(_ROUNDS)), integers)
            bits = builder.add(whole, ir.Constant(integers, [_EXPONENT_BIAS] * count))
            bits = builder.shl(bits, ir.Constant(integers, [_FRACTION_BITS] * count))
            weight = builder.fmul(power, builder.bitcast(bits, floats))
            builder.store(weight, builder.inttoptr(place, floats.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return builder.extract_element(_reduce(builder, builder.load(total), builder.fadd), _INTEGER(0))

    return types.float32(lanes, types.intp, types.intp), generate


@intrinsic(prefer_literal=True)
def _add_values(typing, rows, head_dim, bytes_of, weights, stride, values, count, sums):
    """Add the weighted sums of ``count`` values to ``sums``, the address of ``[rows, head_dim]`` float32.

    ``weights`` is the address of the first weight of the first row, and rows are ``stride`` bytes apart. ``values`` is
    the address of ``[count, head_dim]`` elements of ``bytes_of`` bytes.
    """
    constants = rows, head_dim, bytes_of
    heads, size, element = (each.literal_value for each in constants)
    lanes = gcd(size, _LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, distance, value, count, target = arguments[3:]
        floats = ir.VectorType(_FLOAT, lanes)
        totals = [cgutils.alloca_once(builder, floats) for _ in range(heads * size // lanes)]
        for index, total in enumerate(totals):
            builder.store(_load(builder, target, 4 * index * lanes, lanes), total)
        with cgutils.for_range(builder, count) as loop:
            source = builder.add(value, builder.mul(loop.index, _size(element * size)))
            stored = [_load(builder, source, element * start, lanes, element) for start in range(0, size, lanes)]
            place = builder.add(weight, builder.mul(loop.index, _size(4)))
            for row in range(heads):
                address = builder.add(place, builder.mul(distance, _size(row)))
                single = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
                first = builder.insert_element(ir.Constant(floats, ir.Undefined), single, _INTEGER(0))
                factor = _shuffle(builder, first, first, [0] * lanes)
                for part, each in enumerate(stored):
                    total = totals[row * len(stored) + part]
                    builder.store(_multiply_add(builder, factor, each, builder.load(total)), total)
        for index, total in enumerate(totals):
            place = builder.add(target, _size(4 * index * lanes))
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
    halves = (_shuffle(builder, first, second, [lane + shift for lane in lanes]) for shift in (0, half))
    return builder.fadd(*halves)


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return a vector whose lanes all have the combination of all lanes, in the order of ``_add_halves``."""
    half = vector.type.count // 2
    while half:
        other = _shuffle(builder, vector, vector, [lane ^ half for lane in range(vector.type.count)])
        vector, half = combine(vector, other), half // 2
    return vector


def _shuffle(builder: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INTEGER, len(lanes)), list(lanes)))


def _load(builder: Any, address: Any, offset: int, lanes: int, element: int = 4) -> Any:
    """Return the ``lanes`` floats at ``offset`` bytes from ``address``, stored in ``element`` bytes: 2 for bfloat16."""
    kind = ir.VectorType(_FLOAT if element == 4 else _SHORT, lanes)
    place = builder.inttoptr(builder.add(address, _size(offset)), kind.as_pointer())
    stored = builder.load(place, align=element)
    if element == 4:
        return stored
    integers = ir.VectorType(_INTEGER, lanes)
    bits = builder.shl(builder.zext(stored, integers), ir.Constant(integers, [16] * lanes))
    return builder.bitcast(bits, ir.VectorType(_FLOAT, lanes))


def _multiply_add(builder: Any, first: Any, second: Any, added: Any) -> Any:
    kind = added.type
    function_type = ir.FunctionType(kind, [kind, kind, kind])
    name = f"llvm.fmuladd.v{kind.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [first, second, added])


def _size(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)
