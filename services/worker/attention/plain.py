"""Paged attention in plain torch for any device and dtype, the reference for all other backends."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.attention.base import AttentionBackend, AttentionBatch, AttentionStep, layer_windows
from services.worker.attention.kv_cache import KvCache
from services.worker.described.config import Windows


class PlainAttention(AttentionBackend):
    """Attention that gathers the pages of each row and calls torch."""

    def __init__(self, cache: KvCache, windows: Windows = ()) -> None:
        """``windows`` has an entry per layer of ``cache``, or is () if no layer has a window."""
        self.cache, self.windows = cache, layer_windows(windows, cache)

    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> "PlainStep":
        return PlainStep(self.cache, self.windows, batch, stored)


class PlainStep(AttentionStep):
    """Attention of a step by ``PlainAttention``."""

    def __init__(self, cache: KvCache, windows: Windows, batch: AttentionBatch, stored: Callable[[], object]) -> None:
        self._cache, self._windows, self._stored = cache, windows, stored
        device, size = cache.keys[0].device, cache.page_size
        pages = batch.page_table[batch.token_slots, batch.positions // size].astype(np.int64)
        self._pages = torch.from_numpy(pages).to(device)
        self._offsets = torch.from_numpy(batch.positions % size).to(device)
        self._rows = []
        for slot, start, count in zip(batch.row_slots, batch.row_starts, batch.row_counts, strict=True):
            context = int(batch.positions[start + count - 1]) + 1
            row_pages = torch.from_numpy(batch.page_table[slot, : -(-context // size)].astype(np.int64)).to(device)
            self._rows.append((int(start), int(start + count), context, row_pages))

    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        key_cache, value_cache, window = self._cache.keys[layer], self._cache.values[layer], self._windows[layer]
        key_cache[self._pages, :, self._offsets] = keys
        value_cache[self._pages, :, self._offsets] = values
        self._stored()
        output = queries.new_empty(queries.shape)
        for start, end, context, pages in self._rows:
            output[start:end] = attend_paged(queries[start:end], key_cache, value_cache, pages, context, window)
        return output.flatten(1)


def attend_paged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    context: int,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of ``queries [tokens, heads, head_dim]``, the last tokens of a context, in the same shape.

    ``keys`` and ``values [page_count, kv_heads, page_size, head_dim]`` are the layer's cache, and ``pages`` int64 are
    the pages of the context. Each token attends to itself and the tokens before it, at most ``window`` tokens in all.
    """
    tokens, size = queries.shape[0], keys.shape[2]
    first = 0 if window is None else max(0, context - tokens + 1 - window)  # first token that a query attends to
    seen = slice(first % size, first % size + context - first)
    read = pages[first // size :]
    keys, values = (cache[read].transpose(0, 1).flatten(1, 2)[:, seen] for cache in (keys, values))
    return attend(queries, keys, values, window)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return ``attend_paged`` for gathered ``keys`` and ``values [kv_heads, context, head_dim]``."""
    tokens, context = queries.shape[0], keys.shape[1]
    mask = None
    if tokens > 1:
        mask = torch.ones(tokens, context, dtype=torch.bool, device=queries.device).tril(context - tokens)
        if window is not None:
            mask = mask.triu(context - tokens - window + 1)
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
