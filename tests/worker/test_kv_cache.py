"""The paged KV cache in every dtype."""

import pytest
import torch

from services.worker.attention.kv_cache import KvCache
from services.worker.described.config import ModelConfig
from services.worker.described.layer import LLAMA_LAYER
from services.worker.described.memory import page_bytes
from services.worker.described.rope import RopeSettings
from services.worker.layers.fp8 import FP8
from tests.worker.interpreter import DEVICE

# vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, norm_eps, max_context_tokens, ...
LOCAL = ModelConfig(32, 48, 64, (LLAMA_LAYER,) * 2, 6, 3, 8, 1e-6, 20, (RopeSettings("default", 1e4),), True)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)


def make(dtype: torch.dtype) -> KvCache:
    return KvCache(layers=2, page_count=5, page_size=4, kv_heads=3, head_dim=8, dtype=dtype, device=DEVICE)


@DTYPES
def test_a_cache_begins_with_zeros_and_takes_what_it_says(dtype):
    cache = make(dtype)
    assert cache.keys[1].shape == (5, 3, 4, 8)
    for part in (cache.all_keys, cache.all_values):
        assert part.dtype == dtype
        assert not part.float().any()
    size = sum(part.nbytes for part in (cache.all_keys, cache.all_values, cache.tokens))
    assert size == 5 * page_bytes(LOCAL, 4, dtype.itemsize)


@DTYPES
def test_all_sources_are_read_before_any_target_is_written(dtype):
    cache = make(dtype)
    for part in (cache.all_keys, cache.all_values):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    cache.tokens.copy_(torch.arange(20).view(5, 4))
    before = [part.float().clone() for part in (cache.all_keys, cache.all_values)]
    sources, targets = torch.tensor([0, 1, 4], device=DEVICE), torch.tensor([1, 0, 2], device=DEVICE)
    cache.copy_pages(sources, targets)
    order = [1, 0, 4, 3, 4]
    for part, old in zip((cache.all_keys, cache.all_values), before, strict=True):
        assert torch.equal(part.float(), old[:, order])
    assert cache.tokens[:, 0].tolist() == [4 * page for page in order]
