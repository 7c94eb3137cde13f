"""The paged KV cache."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.common.errors import InvalidRequest
from services.common.plan.routed_experts import RoutedExpertsLayout
from services.worker.layers.fp8 import FP8

# Returns a tensor of zeros of a shape and a dtype.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class KvCache:
    """Keys and values of all layers in pages of ``page_size`` tokens. Only the compute threads write it.

    ``keys[layer]`` and ``values[layer]`` are ``[page_count, kv_heads, page_size, head_dim]``, so that one head of one
    page is contiguous. ``all_keys`` and ``all_values`` have the layers as first dimension. ``tokens [page_count,
    page_size]`` int32 are the token ids, for penalties and thinking budgets. ``routed_experts [page_count + 1,
    page_size, layers with experts, experts per token]`` are uint8 or int16, or None if they are not kept. The last page
    is for padding.

    ``dtype`` is the model's, or float8_e4m3fn on CUDA without a scale, where values beyond 448 are clamped.
    """

    def __init__(
        self,
        *,
        layers: int,
        page_count: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        routed: RoutedExpertsLayout | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """Allocate the cache. Raises ``InvalidRequest`` if there is too little memory.

        ``routed`` is the layout of a token's experts; None = they are not kept. ``allocate`` makes the tensors on
        ``device``; None = torch does.
        """
        allocate = allocate or (lambda shape, dtype: _zeros(shape, dtype, device))
        self.page_count, self.page_size = page_count, page_size
        shape = (layers, page_count, kv_heads, page_size, head_dim)
        try:
            self.all_keys, self.all_values = allocate(shape, dtype), allocate(shape, dtype)
        except (MemoryError, torch.OutOfMemoryError) as error:
            gib = 2 * math.prod(shape) * dtype.itemsize / 2**30
            raise InvalidRequest(
                f"flag kv_cache_num_tokens={page_count * page_size}: the KV cache takes {gib:,.1f} GiB, which {device}"
                " does not have; lower it",
                field="kv_cache_num_tokens",
            ) from error
        self.tokens = allocate((page_count, page_size), torch.int32)
        self.routed_experts = None
        if routed is not None:
            experts = torch.uint8 if routed.bytes_per_expert == 1 else torch.int16
            page_shape = (page_size, routed.layers, routed.experts_per_token)
            self.routed_experts = allocate((page_count + 1, *page_shape), experts)
        self.keys, self.values = list(self.all_keys), list(self.all_values)

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy page ``sources[i]`` to ``targets[i]`` in all layers, with its token ids and experts.

        Both are ``[n]`` int64 on the cache's device.
        """
        for cache in (self.all_keys, self.all_values):
            plain = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # torch cannot index fp8 tensors
            plain[:, targets] = plain[:, sources]
        for each in (self.tokens, self.routed_experts):
            if each is not None:
                each[targets] = each[sources]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy.zeros allocates memory lazily, while torch.zeros writes all of it.
    width = {4: np.int32, 2: np.int16, 1: np.int8}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, dtype=width)).view(dtype)
