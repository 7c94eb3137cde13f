"""The paged KV cache."""

import math

import numpy as np
import torch

from services.common.errors import InvalidRequest
from services.worker.layers.fp8 import FP8


class KvCache:
    """Keys and values of every layer in pages of ``page_size`` tokens. Written by the compute threads only.

    ``keys[layer]`` and ``values[layer]`` are ``[page_count, kv_heads, page_size, head_dim]``: what one head of one page
    reads is contiguous. ``all_keys`` and ``all_values`` are the same with the layers as first dimension.
    ``tokens [page_count, page_size]`` int32: the token ids they were computed from, for penalties.

    ``dtype`` is the model's, or float8_e4m3fn on CUDA: rounded as they are, values beyond 448 to 448.
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
    ) -> None:
        self.page_count, self.page_size = page_count, page_size
        shape = (layers, page_count, kv_heads, page_size, head_dim)
        try:
            self.all_keys, self.all_values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            gib = 2 * math.prod(shape) * dtype.itemsize / 2**30
            raise InvalidRequest(
                f"flag kv_cache_num_tokens={page_count * page_size}: the KV cache takes {gib:,.1f} GiB, which {device}"
                " does not have; lower it",
                field="kv_cache_num_tokens",
            ) from error
        self.tokens = _zeros((page_count, page_size), torch.int32, device)
        self.keys, self.values = list(self.all_keys), list(self.all_values)

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy page ``sources[i]`` onto ``targets[i]`` in every layer, and its token ids. Both ``[n]`` int64 on the
        cache's device."""
        for cache in (self.all_keys, self.all_values):
            plain = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # torch indexes no fp8
            plain[:, targets] = plain[:, sources]
        self.tokens[targets] = self.tokens[sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves the pages to the kernel until they are touched; torch.zeros writes all of them now.
    width = {4: np.int32, 2: np.int16, 1: np.int8}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, dtype=width)).view(dtype)
