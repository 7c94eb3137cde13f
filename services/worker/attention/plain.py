"""Paged attention in plain torch, on any device and dtype: the reference for every other backend."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.attention.base import AttentionBackend, AttentionBatch, AttentionStep
from services.worker.kv_cache import KvCache


class PlainAttention(AttentionBackend):
    """Gathers each row's pages and leaves the rest to torch."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache

    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> "PlainStep":
        return PlainStep(self.cache, batch, stored)


class PlainStep(AttentionStep):
    def __init__(self, cache: KvCache, batch: AttentionBatch, stored: Callable[[], object]) -> None:
        self._cache, self._stored = cache, stored
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
        key_cache, value_cache = self._cache.keys[layer], self._cache.values[layer]
        key_cache[self._pages, :, self._offsets] = keys
        value_cache[self._pages, :, self._offsets] = values
        self._stored()
        output = queries.new_empty(queries.shape)
        for start, end, context, pages in self._rows:
            output[start:end] = attend(
                queries[start:end], gather(key_cache, pages, context), gather(value_cache, pages, context)
            )
        return output.flatten(1)


def gather(cache: torch.Tensor, pages: torch.Tensor, context: int) -> torch.Tensor:
    """The first ``context`` tokens of ``pages``: ``[kv_heads, context, head_dim]``."""
    return cache[pages].transpose(0, 1).flatten(1, 2)[:, :context]


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``queries [tokens, heads, head_dim]`` are the last tokens of the context; returns their shape."""
    tokens, context = queries.shape[0], keys.shape[1]
    mask = None
    if tokens > 1:
        mask = torch.ones(tokens, context, dtype=torch.bool, device=queries.device).tril(context - tokens)
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
