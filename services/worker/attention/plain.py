"""Paged attention in plain torch for any device and dtype, the reference for all other backends."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.attention.base import AttentionBackend, AttentionBatch, AttentionStep, LayerAttention, layer_rules
from services.worker.attention.kv_cache import KvCache

# Tokens whose scores are computed at once where they are held in memory, so that long prompts need little of it.
_BLOCK = 256


class PlainAttention(AttentionBackend):
    """Attention that gathers the pages of each row and calls torch."""

    def __init__(self, cache: KvCache, layers: Sequence[LayerAttention] = ()) -> None:
        """``layers`` has an entry per layer of ``cache``, or is () for the default rules."""
        self.cache, self.layers = cache, layer_rules(layers, cache)

    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> "PlainStep":
        return PlainStep(self.cache, self.layers, batch, stored)


class PlainStep(AttentionStep):
    """Attention of a step by ``PlainAttention``."""

    def __init__(
        self, cache: KvCache, layers: list[LayerAttention], batch: AttentionBatch, stored: Callable[[], object]
    ) -> None:
        self._cache, self._layers, self._stored = cache, layers, stored
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
        key_cache, value_cache, rules = self._cache.keys[layer], self._cache.values[layer], self._layers[layer]
        key_cache[self._pages, :, self._offsets] = keys.to(key_cache.dtype)
        value_cache[self._pages, :, self._offsets] = values.to(value_cache.dtype)
        self._stored()
        output = queries.new_empty(queries.shape)
        for start, end, context, pages in self._rows:
            output[start:end] = attend_paged(queries[start:end], key_cache, value_cache, pages, context, rules)
        return output.flatten(1)


def attend_paged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    context: int,
    rules: LayerAttention,
) -> torch.Tensor:
    """Return the attention of ``queries [tokens, heads, head_dim]``, the last tokens of a context, in the same shape.

    ``keys`` and ``values [page_count, kv_heads, page_size, head_dim]`` are the layer's cache, and ``pages`` int64 are
    the pages of the context. Each token attends to itself and the tokens before it, by ``rules``.
    """
    tokens, size, window = queries.shape[0], keys.shape[2], rules.window
    first = 0 if window is None else max(0, context - tokens + 1 - window)  # first token that a query attends to
    seen = slice(first % size, first % size + context - first)
    read = pages[first // size :]
    keys, values = (cache[read].transpose(0, 1).flatten(1, 2)[:, seen] for cache in (keys, values))
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    return attend(queries, keys, values, rules)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: LayerAttention) -> torch.Tensor:
    """Return ``attend_paged`` for gathered ``keys`` and ``values [kv_heads, context, head_dim]``."""
    tokens, context = queries.shape[0], keys.shape[1]
    mask = torch.ones(tokens, context, dtype=torch.bool, device=queries.device).tril(context - tokens)
    if rules.window is not None:
        mask = mask.triu(context - tokens - rules.window + 1)
    queries = queries.transpose(0, 1)
    if rules.soft_cap is not None or rules.sinks is not None:
        blocks = zip(queries.split(_BLOCK, dim=1), mask.split(_BLOCK), strict=True)
        attended = torch.cat([_attend_by_formula(block, keys, values, seen, rules) for block, seen in blocks], dim=1)
    else:
        attended = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=mask if tokens > 1 else None,
            scale=rules.scale,
            enable_gqa=True,
        )[0]
    return attended.transpose(0, 1)


def _attend_by_formula(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rules: LayerAttention
) -> torch.Tensor:
    """Return the attention of ``queries [heads, tokens, head_dim]`` in the same shape, computed in float32.

    ``mask [tokens, context]`` is true for the keys that a token attends to.
    """
    heads, tokens, _ = queries.shape
    kv_heads = keys.shape[0]
    grouped = queries.reshape(kv_heads, -1, queries.shape[2]).float()  # [kv_heads, group * tokens, head_dim]
    scores = (grouped @ keys.float().transpose(1, 2) * rules.scale).view(heads, tokens, -1)
    if rules.soft_cap is not None:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores)[:, None, None].expand(heads, tokens, 1)
        scores = torch.cat((scores, sinks), dim=2)
    weights = scores.softmax(2)[..., : keys.shape[1]]  # a sink has no value
    return (weights.reshape(kv_heads, -1, keys.shape[1]) @ values.float()).view(queries.shape).to(queries.dtype)
