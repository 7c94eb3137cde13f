"""Which attention backend runs where."""

import torch

from services.worker.attention.base import AttentionBackend
from services.worker.attention.compiled import TraceableAttention
from services.worker.attention.fast_cpu import FastCpuAttention
from services.worker.attention.plain import PlainAttention
from services.worker.kv_cache import KvCache


def make_attention(cache: KvCache, heads: int, *, compiled: bool = False) -> AttentionBackend:
    """The fastest backend for the cache's device and dtype; ``compiled``: for a model under torch.compile."""
    if compiled:
        return TraceableAttention(make_attention(cache, heads))
    keys = cache.keys[0]
    if keys.device.type == "cpu" and keys.dtype == torch.float32:
        return FastCpuAttention(cache, heads)
    return PlainAttention(cache)
