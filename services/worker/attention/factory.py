"""Choice of the attention backend."""

from collections.abc import Sequence

import torch

from services.worker.attention.base import AttentionBackend
from services.worker.attention.compiled import TraceableAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention
from services.worker.described.layer import AttentionConfig, undeclared


def make_attention(
    cache: KvCache, heads: int, layers: Sequence[AttentionConfig] = (), *, compiled: bool = False
) -> AttentionBackend:
    """Return the fastest backend that supports ``layers`` and the cache's device and dtype.

    ``layers`` describes each layer of ``cache``; () means that all have the default features. ``compiled`` is true for
    use with torch.compile.
    """
    if compiled:
        return TraceableAttention(make_attention(cache, heads, layers))
    keys, windows = cache.keys[0], tuple(layer.window for layer in layers)
    if keys.device.type == "cpu" and keys.dtype == torch.float32:
        from services.worker.attention.fast_cpu import SUPPORTED, FastCpuAttention  # loads numba

        if not any(undeclared(layer, SUPPORTED) for layer in layers):
            return FastCpuAttention(cache, heads, windows)
    return PlainAttention(cache, windows)
