"""Choice of the attention backend."""

from collections.abc import Sequence

import torch

from services.worker.attention.base import AttentionBackend, LayerAttention
from services.worker.attention.compiled import TraceableAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention


def make_attention(
    cache: KvCache, heads: int, layers: Sequence[LayerAttention] = (), *, compiled: bool = False
) -> AttentionBackend:
    """Return the fastest backend that supports ``layers`` and the cache's device and dtype.

    ``layers`` has the rules of each layer of ``cache``; () means default rules. ``compiled`` is true for use with
    torch.compile.
    """
    if compiled:
        return TraceableAttention(make_attention(cache, heads, layers))
    keys = cache.keys[0]
    if keys.device.type == "cpu" and keys.dtype == torch.float32:
        from services.worker.attention.fast_cpu import FastCpuAttention, supports  # loads numba

        if all(supports(layer) for layer in layers):
            return FastCpuAttention(cache, heads, layers)
    return PlainAttention(cache, layers)
