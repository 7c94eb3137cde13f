"""Attention backend for CPUs with queries in float32: compiled kernels, and torch for rows of many tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.attention.attend_cpu import new_scores
from services.worker.attention.base import AttentionBackend, AttentionBatch, AttentionStep, LayerAttention, layer_rules
from services.worker.attention.kernels import Storage, first_tokens, kernels, pages_of
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import attend_paged

# Row length in tokens from which gathering the context for a matrix product is faster than reading it per token, if the
# row is not half of its context. Otherwise the product mostly computes scores of later tokens, which do not count.
LONG_ROW = 48
# Dtypes of the cache, and what the kernels call them.
STORAGES: dict[torch.dtype, Storage] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def supports(rules: LayerAttention) -> bool:
    """Return whether ``FastCpuAttention`` computes attention by ``rules``. It needs default values for other features.

    The layer rotates queries and keys.
    """
    return rules == LayerAttention(rules.scale, rules.window, rope=rules.rope)


class FastCpuAttention(AttentionBackend):
    """Attention over ``cache`` with ``heads`` query heads. The constructor compiles the kernels."""

    def __init__(self, cache: KvCache, heads: int, layers: Sequence[LayerAttention] = ()) -> None:
        """``layers`` has an entry per layer of ``cache``, or is () for the default rules; see ``supports``."""
        self.cache, self.heads, self.layers = cache, heads, layer_rules(layers, cache)
        _, self.kv_heads, _, self.head_dim = cache.keys[0].shape
        self.group = heads // self.kv_heads
        self.kernels = kernels(self.head_dim, self.group, cache.page_size, STORAGES[cache.all_keys.dtype])
        self.key_pages = [pages_of(pages) for pages in cache.keys]
        self.value_pages = [pages_of(pages) for pages in cache.values]

    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> "FastCpuStep":
        return FastCpuStep(self, batch, stored)


class FastCpuStep(AttentionStep):
    """Attention of a step by ``FastCpuAttention``."""

    def __init__(self, backend: FastCpuAttention, batch: AttentionBatch, stored: Callable[[], object]) -> None:
        self._backend, self._batch, self._stored = backend, batch, stored
        size, ends = backend.cache.page_size, batch.row_starts + batch.row_counts
        contexts = batch.positions[ends - 1] + 1
        long = (batch.row_counts >= LONG_ROW) & (2 * batch.row_counts < contexts)
        self._tokens, self._long = np.arange(len(batch.positions)), []
        if long.any():
            self._tokens = self._tokens[~np.repeat(long, batch.row_counts)]
            for row in np.flatnonzero(long).tolist():
                start, end, context = int(batch.row_starts[row]), int(ends[row]), int(contexts[row])
                pages = batch.page_table[batch.row_slots[row], : -(-context // size)].astype(np.int64)
                self._long.append((start, end, context, torch.from_numpy(pages)))
        self._slots, self._lengths = batch.token_slots[self._tokens], batch.positions[self._tokens] + 1
        self._firsts = {
            window: first_tokens(self._lengths, window) for window in {rules.window for rules in backend.layers}
        }
        longest = int(self._lengths.max(initial=1))
        self._scores = new_scores(backend.group, longest)

    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        backend, batch = self._backend, self._batch
        key_pages, value_pages, rules = backend.key_pages[layer], backend.value_pages[layer], backend.layers[layer]
        backend.kernels.store(
            keys.numpy(),
            values.numpy(),
            key_pages,
            value_pages,
            batch.token_slots,
            batch.positions,
            batch.page_table,
            0,
        )
        self._stored()
        output = np.empty((queries.shape[0], backend.heads * backend.head_dim), np.float32)
        if len(self._tokens):
            backend.kernels.attend(
                queries.numpy(),
                key_pages,
                value_pages,
                self._tokens,
                self._slots,
                self._firsts[rules.window],
                self._lengths,
                batch.page_table,
                np.float32(rules.scale),
                self._scores,
                output,
                0,
            )
        attended = torch.from_numpy(output)
        for start, end, context, pages in self._long:
            caches = backend.cache.keys[layer], backend.cache.values[layer]
            attended[start:end] = attend_paged(queries[start:end], *caches, pages, context, rules).flatten(1)
        return attended
