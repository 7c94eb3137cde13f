"""Keeps the experts that each layer chooses for each token beside the KV cache, and finds those that a result carries.

They are in pages like keys and values, so cached prefixes and copied pages have them too.
"""

from typing import NamedTuple

import numpy as np
import torch

from services.common.plan.routed_experts import RoutedExperts
from services.worker.attention.kv_cache import KvCache
from services.worker.models.base import RankModel
from services.worker.models.experts import Experts
from services.worker.step.slots import SlotTable


class RoutedRuns(NamedTuple):
    """The tokens of a step's sequences whose experts a result carries. On the host."""

    slots: np.ndarray  # [n] int64, in batch order
    starts: np.ndarray  # [n] int64, position in the sequence of the first token
    counts: np.ndarray  # [n] int64
    indices: np.ndarray  # [tokens] int64, of the tokens in the cache

    def with_experts(self, experts: torch.Tensor) -> RoutedExperts:
        """Return the result. ``experts [tokens, token_bytes]`` uint8 are on the host."""
        return RoutedExperts(self.slots, self.starts, self.counts, experts.numpy())


def find_routed(rows: np.ndarray, counts: np.ndarray, slots: SlotTable) -> RoutedRuns | None:
    """Return the tokens for a step that computes ``counts [rows]`` tokens of the slots ``rows``, or None for none."""
    if not slots.routed:
        return None
    starts, ends = slots.routed_start[rows], slots.computed[rows] + counts
    chosen = np.flatnonzero((starts >= 0) & (starts < ends))
    if not len(chosen):
        return None
    owners, starts, lengths = rows[chosen], starts[chosen], (ends - starts)[chosen]
    before = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(before - starts, lengths)
    return RoutedRuns(owners, starts, lengths, slots.cache_indices(np.repeat(owners, lengths), positions))


class ExpertRecorder:
    """Reads the experts of the present step from the layers of a model. Owned by the compute thread.

    All memory has fixed addresses, and no method waits for the device, so CUDA graphs can capture ``store``.
    """

    def __init__(self, model: RankModel, cache: KvCache, most_tokens: int) -> None:
        """Connect to the layers. ``most_tokens``: of a step, padding included. ``cache`` must keep experts."""
        assert cache.routed_experts is not None
        _, self._page_size, layers, chosen = cache.routed_experts.shape
        self._kept = cache.routed_experts.view(-1, layers, chosen)
        self._padding = cache.page_count * self._page_size  # index for the experts of padding, which nothing reads
        mixtures = [module for module in model.modules() if isinstance(module, Experts)]
        # [layers, tokens, chosen]: each layer writes its part.
        self._step = torch.zeros(layers, most_tokens, chosen, dtype=self._kept.dtype, device=self._kept.device)
        for mixture, part in zip(mixtures, self._step, strict=True):
            mixture.chosen_experts = part

    def store(self, indices: torch.Tensor) -> None:
        """Launch the copy of the step's experts into the cache. ``indices [tokens]`` int64, of its tokens there."""
        self._kept.index_copy_(0, indices, self._step[:, : len(indices)].transpose(0, 1).contiguous())

    def store_at(self, slots: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor) -> None:
        """Launch ``store`` for the tokens at ``positions [tokens]`` int32 of ``slots [tokens]`` int32, -1 = padding.

        ``page_table [max_slots, max_pages]`` int32 is the device's.
        """
        used, positions = slots >= 0, positions.long()
        places = torch.where(used, positions // self._page_size, 0)
        pages = page_table[slots.clamp(min=0).long(), places].long()
        self.store(torch.where(used, pages * self._page_size + positions % self._page_size, self._padding))

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the experts at ``indices [tokens]`` int64 in the cache, ``[tokens, token_bytes]`` uint8."""
        return self._kept[indices].flatten(1).view(torch.uint8)
