"""Attention of many rows to the prefixes that they share, on Hopper.

One kernel copies keys and values of each prefix from their pages to contiguous rows, in the dtype of queries. The
kernel of ``gluon_prefixes`` then attends to these rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from services.worker.attention.base import LayerAttention
from services.worker.attention.gluon_prefixes import FIELDS, ROWS, WIDTH, PrefixSizes, attend_prefixes
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.spans import Spans, cut
from services.worker.attention.triton_decode import as_dtype, score_factors
from services.worker.layers.cuda_devices import is_hopper, multiprocessors
from services.worker.layers.gluon_grouped import describe


class _Options(NamedTuple):
    """Options that depend on the dimensions of a head. Measured on an H200."""

    keys: int  # as in ``PrefixSizes``
    slots: int
    consumers: int
    registers: int
    fewest_rows: int  # of a step, times query heads. Steps with fewer use other kernels


# The length of prefixes does not matter for the choice, so that the rehearsal, whose prefixes have one page, compiles
# these kernels.
OPTIONS = {64: _Options(128, 4, 3, 160, 640 * 3 * ROWS), 128: _Options(128, 2, 2, 240, 512 * 2 * ROWS)}
_FULL = 0.75  # least filled share of the tiles. Steps with emptier ones use other kernels
_COPIED_BYTES = 64 << 20  # of keys and values of one layer
_SMALLEST_PAGE = 8  # tokens. Smaller ones would be copied slowly


@triton.jit(do_not_specialize=["table_stride", "capacity"])
def copy_prefixes(
    keys, values, tiles, page_table, key_rows, value_rows, table_stride, capacity, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Copy the pages that each tile lists. Grid: ``(tiles * kv_heads,)``.

    ``key_rows`` and ``value_rows [kv_heads * capacity, head_dim]`` have the rows of all prefixes for each kv head.
    Copied rows after the last key of a prefix are zeros.
    """
    fields = tiles + tl.program_id(0) // KV_HEADS * FIELDS
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    slot, context, row = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    page, count = tl.load(fields + 5), tl.load(fields + 6)
    table = page_table + slot.to(tl.int64) * table_stride
    inside = tl.arange(0, PAGE * HEAD_DIM)
    for each in range(page, page + count):
        used = inside < tl.where(each * PAGE < context, PAGE * HEAD_DIM, 0)
        stored = tl.load(table + each, each * PAGE < context, other=0).to(tl.int64)
        source = (stored * KV_HEADS + head) * (PAGE * HEAD_DIM) + inside
        target = (head * capacity + row + each * PAGE) * HEAD_DIM + inside
        key, value = tl.load(keys + source, used, other=0.0), tl.load(values + source, used, other=0.0)
        tl.store(key_rows + target, as_dtype(key, key_rows.dtype.element_ty))
        tl.store(value_rows + target, as_dtype(value, value_rows.dtype.element_ty))


def prefix_tiles(spans: Spans, tokens: int, keys: int, page_size: int) -> np.ndarray:
    """Split spans into tiles of at most ``tokens`` query tokens, ``[tiles, FIELDS]`` int32, the longest contexts first.

    ``keys`` is the number of keys of a block, a multiple of ``page_size``. The pages of a span are divided among its
    tiles.
    """
    span, number, counts = cut(spans, tokens)
    copied = -(-spans.contexts // keys) * keys
    rows, pages = np.cumsum(copied) - copied, (copied // page_size)[span]
    share = -(-pages // np.bincount(span)[span])
    page = np.minimum(number * share, pages)
    fields = (
        spans.starts[span] + number * tokens, counts, spans.slots[span], spans.contexts[span], rows[span], page,
        np.minimum(pages - page, share),
    )  # fmt: skip
    order = np.argsort(-spans.contexts[span], kind="stable")
    return np.stack(fields, axis=1)[order].astype(np.int32)


class PlannedPrefixes(NamedTuple):
    """Prefixes of a step, as tiles for the kernels."""

    tiles: torch.Tensor  # [tiles, FIELDS] int32
    page_table: torch.Tensor  # [max_slots, max_pages] int32
    copies: torch.Tensor  # [2, kv_heads * capacity, head_dim], the copied keys and values
    described: tuple[TensorDescriptor, TensorDescriptor]  # of both, for copies of blocks to shared memory
    sizes: PrefixSizes

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        rules: LayerAttention,
    ) -> None:
        """Attend. Arguments are as in ``PlannedTiles.run`` of ``triton_spans``; ``lse`` is not None."""
        sizes, (key_rows, value_rows) = self.sizes, self.copies
        group, units = sizes.heads // sizes.kv_heads, len(self.tiles) * sizes.kv_heads
        capacity = len(key_rows) // sizes.kv_heads
        copy_prefixes[(units,)](
            keys, values, self.tiles, self.page_table, key_rows, value_rows, self.page_table.stride(0), capacity,
            KV_HEADS=sizes.kv_heads, HEAD_DIM=sizes.head_dim, PAGE=keys.shape[2], FIELDS=FIELDS,
        )  # fmt: skip
        attend_prefixes[(min(units, multiprocessors(queries.device)),)](
            describe(queries, (ROWS // group, group, WIDTH)), *self.described, self.tiles, output, lse, units, capacity,
            score_factors(rules).scale, C=sizes, num_warps=4,
        )  # fmt: skip


class WidePrefixes:
    """Attention of many rows to shared prefixes, on Hopper."""

    def __init__(self, cache: KvCache, heads: int, dtype: torch.dtype) -> None:
        """Allocate memory for copies. ``dtype`` is that of queries. ``supports`` must be true."""
        _, kv_heads, page_size, head_dim = cache.keys[0].shape
        self._options, self._page_size = OPTIONS[head_dim], page_size
        self._sizes = PrefixSizes(heads, kv_heads, head_dim, *self._options[:-1])
        self._capacity = _COPIED_BYTES // (2 * kv_heads * head_dim * dtype.itemsize)  # tokens
        shape = 2, kv_heads * self._capacity, head_dim
        self._copies = torch.empty(shape, dtype=dtype, device=cache.keys[0].device)
        key_rows, value_rows = self._copies
        keys = self._sizes.keys
        self._described = describe(key_rows, (keys, WIDTH)), describe(value_rows, (keys, head_dim))
        self._tokens = self._sizes.consumers * ROWS // (heads // kv_heads)  # of a tile

    @staticmethod
    def supports(cache: KvCache, heads: int, dtype: torch.dtype, rules: LayerAttention, most_rows: int) -> bool:
        """Return whether the kernels support prefixes in a layer of ``rules``, and steps of ``most_rows`` need them."""
        _, kv_heads, page_size, head_dim = cache.keys[0].shape
        group, options = heads // kv_heads, OPTIONS.get(head_dim)
        return bool(
            is_hopper(cache.keys[0].device)
            and dtype in (torch.bfloat16, torch.float16)
            and options is not None
            and group <= ROWS
            and group & (group - 1) == 0
            and page_size >= _SMALLEST_PAGE
            and options.keys % page_size == 0
            and rules == LayerAttention(rules.scale, rope=rules.rope)
            and rules.scale > 0
            and most_rows * heads >= options.fewest_rows
        )

    def takes(self, spans: Spans) -> bool:
        """Return whether ``spans`` are faster with these kernels than with others, and their copies have room."""
        rows, keys = int(spans.counts.sum()), self._sizes.keys
        tiles, blocks = (
            int((-(-each // size)).sum()) for each, size in ((spans.counts, self._tokens), (spans.contexts, keys))
        )
        enough = rows * self._sizes.heads >= self._options.fewest_rows
        return enough and rows >= _FULL * tiles * self._tokens and blocks * keys <= self._capacity

    def plan(
        self, spans: Spans, page_table: torch.Tensor, put: Callable[[np.ndarray], torch.Tensor]
    ) -> PlannedPrefixes:
        """Plan ``spans``, which ``takes`` accepts. ``put`` copies an array to the device."""
        fields = prefix_tiles(spans, self._tokens, self._sizes.keys, self._page_size)
        return PlannedPrefixes(put(fields), page_table, self._copies, self._described, self._sizes)
