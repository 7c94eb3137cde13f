"""Kernel for attention of many rows to the prefixes that they share, on tensor cores of Hopper.

Gluon is the lower-level language of Triton: the kernel chooses layouts and synchronises warps. ``triton_prefixes``
copies keys and values of prefixes to contiguous rows. A producer warp loads queries and these rows into rings in shared
memory. Groups of four warps, the consumers, attend to them, each for rows of its own. While tensor cores multiply
weights and values of a block of keys, a consumer computes the weights of the next block (FlashAttention-3,
arXiv:2407.08608). A unit is a tile and a kv head. A program computes several units in turn. It starts a unit before it
has finished the previous one.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# Fields of a tile: first query token, number of query tokens, sequence slot, number of keys, first copied row, and the
# first page and the number of pages to copy with this tile.
FIELDS = 7
ROWS = 64  # of a consumer: query tokens times query heads per kv head
WIDTH = 64  # dimensions of queries and keys that are copied together
_ROWS, _WIDTH = gl.constexpr(ROWS), gl.constexpr(WIDTH)
_PRODUCER_REGISTERS = gl.constexpr(24)


class PrefixSizes(NamedTuple):
    """The constants of ``attend_prefixes``."""

    heads: int
    kv_heads: int
    head_dim: int  # 64 or 128
    keys: int  # of a block
    slots: int  # of the ring of keys, and of that of values
    consumers: int  # 2 or 3
    registers: int  # of a thread of a consumer
    fields: int = FIELDS


@gluon.jit(do_not_specialize=["units", "capacity"])
def attend_prefixes(queries, keys, values, tiles, output, lse, units, capacity, scale, C: gl.constexpr):
    """Attend for each tile and kv head, which are ``units``. Grid: ``(programs,)``, at most one per multiprocessor.

    ``queries [tokens, heads, head_dim]``, and ``keys`` and ``values [kv_heads * capacity, head_dim]`` are descriptors.
    ``scale`` is that of ``ScoreFactors``, and ``C`` are ``PrefixSizes``.
    """
    HALVES: gl.constexpr = C.head_dim // _WIDTH
    SLOTS: gl.constexpr = C.slots
    CONSUMERS: gl.constexpr = C.consumers
    # Each consumer has two buffers for queries, so that the queries of the next unit are loaded early.
    BUFFERS: gl.constexpr = 2 * CONSUMERS * HALVES
    query_ring = gl.allocate_shared_memory(queries.dtype, [BUFFERS] + queries.block_type.shape, queries.layout)  # noqa: RUF005
    key_ring = gl.allocate_shared_memory(keys.dtype, [SLOTS * HALVES] + keys.block_type.shape, keys.layout)  # noqa: RUF005
    value_ring = gl.allocate_shared_memory(values.dtype, [SLOTS] + values.block_type.shape, values.layout)  # noqa: RUF005
    queries_filled = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    queries_free = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    keys_filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    values_filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2 * CONSUMERS):
        mbarrier.init(queries_filled.index(buffer), count=1)
        mbarrier.init(queries_free.index(buffer), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(keys_filled.index(slot), count=1)
        mbarrier.init(values_filled.index(slot), count=1)
        mbarrier.init(keys_free.index(slot), count=CONSUMERS)
        mbarrier.init(values_free.index(slot), count=CONSUMERS)
    query_buffers = (query_ring, queries_filled, queries_free)
    key_slots = (key_ring, keys_filled, keys_free)
    value_slots = (value_ring, values_filled, values_free)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (query_buffers, key_slots, value_slots, tiles, output, lse, units, scale, 0, C)),
                (_consume, (query_buffers, key_slots, value_slots, tiles, output, lse, units, scale, 1, C)),
                (_produce, (query_buffers, key_slots, value_slots, queries, keys, values, tiles, units, capacity, C)),
            ],
            [4, 1],
            [C.registers, _PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (query_buffers, key_slots, value_slots, tiles, output, lse, units, scale, 0, C)),
                (_consume, (query_buffers, key_slots, value_slots, tiles, output, lse, units, scale, 1, C)),
                (_consume, (query_buffers, key_slots, value_slots, tiles, output, lse, units, scale, 2, C)),
                (_produce, (query_buffers, key_slots, value_slots, queries, keys, values, tiles, units, capacity, C)),
            ],
            [4, 4, 1],
            [C.registers, C.registers, _PRODUCER_REGISTERS],
        )


@gluon.jit
def _count_blocks(tiles, unit, C: gl.constexpr):
    """Return the number of keys of ``unit``, and the number of blocks that they fill."""
    keys = gl.load(tiles + unit // C.kv_heads * C.fields + 3)
    return keys, (keys + C.keys - 1) // C.keys


@gluon.jit
def _produce(query_buffers, key_slots, value_slots, queries, keys, values, tiles, units, capacity, C: gl.constexpr):
    """Fill the rings in the order in which consumers empty them.

    The last block of keys comes first, so that only the first block that is computed needs a mask.
    """
    HALVES: gl.constexpr = C.head_dim // _WIDTH
    GROUP: gl.constexpr = C.heads // C.kv_heads
    CONSUMERS: gl.constexpr = C.consumers
    query_ring, queries_filled, queries_free = query_buffers
    key_ring, keys_filled, keys_free = key_slots
    value_ring, values_filled, values_free = value_slots
    earlier_blocks = 0  # blocks of earlier units
    earlier_units = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        fields = tiles + unit // C.kv_heads * C.fields
        head = unit % C.kv_heads
        first = gl.load(fields)
        row = head * capacity + gl.load(fields + 4)
        _, blocks = _count_blocks(tiles, unit, C)
        for consumer in gl.static_range(CONSUMERS):
            buffer = 2 * consumer + earlier_units % 2
            mbarrier.wait(queries_free.index(buffer), (earlier_units // 2 & 1) ^ 1)
            mbarrier.expect(queries_filled.index(buffer), queries.block_type.nbytes * HALVES)
            for half in gl.static_range(HALVES):
                source = [first + consumer * (_ROWS // GROUP), head * GROUP, half * _WIDTH]
                query = query_ring.index(buffer * HALVES + half)
                tma.async_copy_global_to_shared(queries, source, queries_filled.index(buffer), query)
        earlier_units = earlier_units + 1
        for block in range(0, blocks):
            number = earlier_blocks + block
            slot = number % C.slots
            source_row = row + (blocks - 1 - block) * C.keys
            mbarrier.wait(keys_free.index(slot), (number // C.slots & 1) ^ 1)
            mbarrier.expect(keys_filled.index(slot), keys.block_type.nbytes * HALVES)
            for half in gl.static_range(HALVES):
                key = key_ring.index(slot * HALVES + half)
                tma.async_copy_global_to_shared(keys, [source_row, half * _WIDTH], keys_filled.index(slot), key)
            mbarrier.wait(values_free.index(slot), (number // C.slots & 1) ^ 1)
            mbarrier.expect(values_filled.index(slot), values.block_type.nbytes)
            tma.async_copy_global_to_shared(values, [source_row, 0], values_filled.index(slot), value_ring.index(slot))
        earlier_blocks += blocks


@gluon.jit
def _score(query_buffers, key_slots, buffer, number, SCORES: gl.constexpr, C: gl.constexpr):
    """Start to multiply the queries at ``buffer`` by the keys of block ``number``."""
    HALVES: gl.constexpr = C.head_dim // _WIDTH
    KEYS: gl.constexpr = C.keys
    query_ring, _, _ = query_buffers
    key_ring, keys_filled, _ = key_slots
    slot = number % C.slots
    mbarrier.wait(keys_filled.index(slot), number // C.slots & 1)
    scores = warpgroup_mma_init(gl.zeros([_ROWS, KEYS], gl.float32, SCORES))
    for half in gl.static_range(HALVES):
        query = query_ring.index(buffer * HALVES + half).reshape([_ROWS, _WIDTH])
        key = key_ring.index(slot * HALVES + half).permute((1, 0))
        scores = warpgroup_mma(query, key, scores, use_acc=half > 0, is_async=True)
    return scores


@gluon.jit
def _consume(
    query_buffers, key_slots, value_slots, tiles, output, lse, units, scale, CONSUMER: gl.constexpr, C: gl.constexpr
):
    """Attend for the rows of ``CONSUMER`` in each unit of this program."""
    KEYS: gl.constexpr = C.keys
    DIM: gl.constexpr = C.head_dim
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    _, queries_filled, queries_free = query_buffers
    _, _, keys_free = key_slots
    value_ring, values_filled, values_free = value_slots
    DTYPE: gl.constexpr = value_ring.dtype
    earlier_blocks = 0  # blocks of earlier units
    earlier_units = 0
    previous_unit = 0
    peak = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    total = peak
    sums = gl.zeros([_ROWS, DIM], gl.float32, SUMS)
    weights = gl.zeros([_ROWS, KEYS], DTYPE, WEIGHTS)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        keys, blocks = _count_blocks(tiles, unit, C)
        buffer = 2 * CONSUMER + earlier_units % 2
        # Score the first block of this unit while the last values of the previous unit are added. The first unit has no
        # previous one: its product reads undefined memory, and its sums are discarded.
        has_previous = earlier_units > 0
        previous_slot = (earlier_blocks + C.slots - 1) % C.slots
        mbarrier.wait(queries_filled.index(buffer), earlier_units // 2 & 1)
        pending = _score(query_buffers, key_slots, buffer, earlier_blocks, SCORES, C)
        mbarrier.wait(values_filled.index(previous_slot), (earlier_blocks - 1) // C.slots & 1, pred=has_previous)
        pending_sums = warpgroup_mma(weights, value_ring.index(previous_slot), sums, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[pending])
        mbarrier.arrive(keys_free.index(earlier_blocks % C.slots), count=1)
        column = (blocks - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        scores = gl.where((column < keys)[None, :], scores, float("-inf"))
        highest = gl.max(scores, axis=1)
        new_weights = gl.exp2(scores * scale - (highest * scale)[:, None])
        sums, weights = warpgroup_mma_wait(0, deps=[pending_sums, weights])
        mbarrier.arrive(values_free.index(previous_slot), count=1, pred=has_previous)
        if has_previous:
            _store(sums, peak, total, tiles, output, lse, previous_unit, scale, CONSUMER, SCORES, SUMS, C)
        peak = highest
        total = gl.sum(new_weights, axis=1)
        weights = gl.convert_layout(new_weights.to(DTYPE), WEIGHTS)
        sums = gl.zeros([_ROWS, DIM], gl.float32, SUMS)
        for number in range(earlier_blocks + 1, earlier_blocks + blocks):
            pending = _score(query_buffers, key_slots, buffer, number, SCORES, C)
            previous_slot = (number - 1) % C.slots
            mbarrier.wait(values_filled.index(previous_slot), (number - 1) // C.slots & 1)
            pending_sums = warpgroup_mma(weights, value_ring.index(previous_slot), sums, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[pending])
            mbarrier.arrive(keys_free.index(number % C.slots), count=1)
            higher = gl.maximum(peak, gl.max(scores, axis=1))
            new_weights = gl.exp2(scores * scale - (higher * scale)[:, None])
            correction = gl.exp2((peak - higher) * scale)
            total = total * correction + gl.sum(new_weights, axis=1)
            peak = higher
            sums, weights = warpgroup_mma_wait(0, deps=[pending_sums, weights])
            mbarrier.arrive(values_free.index(previous_slot), count=1)
            sums = sums * gl.convert_layout(correction, gl.SliceLayout(1, SUMS))[:, None]
            weights = gl.convert_layout(new_weights.to(DTYPE), WEIGHTS)
        mbarrier.arrive(queries_free.index(buffer), count=1)
        earlier_blocks += blocks
        earlier_units += 1
        previous_unit = unit
    if earlier_units > 0:
        previous_slot = (earlier_blocks - 1) % C.slots
        mbarrier.wait(values_filled.index(previous_slot), (earlier_blocks - 1) // C.slots & 1)
        pending_sums = warpgroup_mma(weights, value_ring.index(previous_slot), sums, is_async=True)
        sums, weights = warpgroup_mma_wait(0, deps=[pending_sums, weights])
        _store(sums, peak, total, tiles, output, lse, previous_unit, scale, CONSUMER, SCORES, SUMS, C)


@gluon.jit
def _store(
    sums, peak, total, tiles, output, lse, unit, scale, CONSUMER: gl.constexpr, SCORES: gl.constexpr,
    SUMS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Store the results of the rows of ``CONSUMER`` in ``unit``."""
    GROUP: gl.constexpr = C.heads // C.kv_heads
    DIM: gl.constexpr = C.head_dim
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    fields = tiles + unit // C.kv_heads * C.fields
    first = gl.load(fields) + CONSUMER * (_ROWS // GROUP)
    remaining = gl.load(fields + 1) - CONSUMER * (_ROWS // GROUP)
    head = unit % C.kv_heads * GROUP
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, SCORES))
    offsets = (first + row // GROUP).to(gl.int64) * C.heads + head + row % GROUP
    gl.store(lse + offsets, peak * scale + gl.log2(total), row // GROUP < remaining)
    result = sums * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None]
    result = gl.convert_layout(result.to(output.dtype.element_ty), STORED)
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, STORED))
    offsets = (first + row // GROUP).to(gl.int64) * C.heads + head + row % GROUP
    dims = gl.arange(0, DIM, gl.SliceLayout(0, STORED))
    inside = (row // GROUP < remaining)[:, None] & (dims < DIM)[None, :]
    gl.store(output + offsets[:, None] * DIM + dims[None, :], result, inside)
