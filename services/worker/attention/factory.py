"""Choice of the attention backend."""

from collections.abc import Sequence

import torch

from services.worker.attention.base import AttentionBackend, LayerAttention
from services.worker.attention.compiled import TraceableAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention


def make_attention(
    cache: KvCache,
    heads: int,
    layers: Sequence[LayerAttention] = (),
    *,
    compiled: bool = False,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Return the fastest backend that supports ``layers``, the cache's device and dtype, and queries of ``dtype``.

    ``layers`` has the rules of each layer of ``cache``; () means default rules. ``compiled`` is true for use with
    torch.compile. ``dtype``: None = that of the cache.
    """
    if compiled:
        return TraceableAttention(make_attention(cache, heads, layers, dtype=dtype))
    keys = cache.keys[0]
    if keys.device.type == "cpu" and (dtype or keys.dtype) == torch.float32:
        from services.worker.attention.fast_cpu import STORAGES, FastCpuAttention, supports  # loads numba

        if keys.dtype in STORAGES and all(supports(layer) for layer in layers):
            return FastCpuAttention(cache, heads, layers)
    return PlainAttention(cache, layers)
