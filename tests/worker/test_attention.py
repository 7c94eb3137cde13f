"""The fast backend gives what plain torch gives."""

from itertools import product

import numpy as np
import pytest
import torch

from services.worker.attention import fast_cpu, plain
from services.worker.attention.base import AttentionBatch, LayerAttention
from services.worker.attention.factory import make_attention
from services.worker.attention.fast_cpu import LONG_ROW, FastCpuAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention
from tests.quick import quick_if

ROWS = {
    "decode": [(1, 1), (16, 1), (17, 1), (100, 1), (33, 1)],  # (context, tokens of the row)
    "short prefill": [(5, 5), (40, 7), (16, 16)],
    "long prefill": [(LONG_ROW, LONG_ROW), (200, 3 * LONG_ROW), (300, 3 * LONG_ROW)],
    "mixed": [(64, 1), (150, 100), (9, 9), (1, 1), (130, 60)],
}
SIZES = [(6, 2, 64), (4, 4, 16), (8, 1, 128), (4, 2, 48), (7, 1, 24), (2, 2, 6), (3, 1, 1), (2, 1, 512)]
KERNELS = [(dtype, page, *sizes) for dtype, page, sizes in product([torch.float32, torch.bfloat16], [1, 16], SIZES)]


def is_quick(dtype: torch.dtype, page_size: int, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether ``make test`` compiles these kernels: each dtype, page size and number of lanes once or twice."""
    page = {(torch.float32, 48): 16, (torch.float32, 24): 1, (torch.bfloat16, 6): 1, (torch.bfloat16, 1): 16}
    return page_size == page.get((dtype, head_dim))


def filled_cache(pages: int, page_size: int, kv_heads: int, head_dim: int, dtype=torch.float32) -> KvCache:
    shape = {"layers": 2, "page_count": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
    cache = KvCache(**shape, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for stored in (*cache.keys, *cache.values):
        stored.copy_(torch.randn(stored.shape, generator=generator))
    return cache


def batch_of(rows: list[tuple[int, int]], page_size: int) -> AttentionBatch:
    counts = np.array([tokens for _, tokens in rows])
    widest = max(-(-context // page_size) for context, _ in rows)
    pages = np.random.default_rng(0).permutation(len(rows) * widest).astype(np.int32)
    return AttentionBatch(
        token_slots=np.repeat(np.arange(len(rows)), counts),
        positions=np.concatenate([np.arange(context - tokens, context) for context, tokens in rows]),
        row_slots=np.arange(len(rows)),
        row_starts=np.cumsum(counts) - counts,
        row_counts=counts,
        page_table=pages.reshape(len(rows), widest),
    )


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("dtype", "page_size", "heads", "kv_heads", "head_dim"), quick_if(is_quick, KERNELS), ids=str)
def test_fast_and_plain_attention_agree(dtype, rows, heads, kv_heads, head_dim, page_size):
    compare_fast_and_plain(rows, heads, kv_heads, head_dim, page_size, dtype=dtype)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [1, 16, 21, 100])
@pytest.mark.parametrize("page_size", [1, 16])
def test_fast_and_plain_attention_agree_on_windows(rows, window, page_size):
    compare_fast_and_plain(rows, 4, 2, 16, page_size, [LayerAttention(0.25), LayerAttention(0.3, window)])


@pytest.mark.parametrize(
    ("context", "tokens", "gathers"),
    [(LONG_ROW, LONG_ROW, False), (200, 100, False), (201, 100, True), (99, 9, False)],
)
def test_only_long_rows_behind_a_longer_context_gather_it(context, tokens, gathers, monkeypatch):
    called, call = [], fast_cpu.attend_paged
    monkeypatch.setattr(fast_cpu, "attend_paged", lambda *arguments: called.append(1) or call(*arguments))
    compare_fast_and_plain([(context, tokens)], 4, 2, 16, 16)
    assert bool(called) is gathers


def test_weights_of_fast_attention_are_exact_to_the_last_bits():
    """Rows that attend to two tokens, so that errors of the weights do not cancel."""
    batch, head_dim = batch_of([(2, 1)] * 500, 16), 16
    cache = filled_cache(batch.page_table.size, 16, 1, head_dim)
    queries, keys, values = torch.randn(3, 500, 1, head_dim, generator=torch.Generator().manual_seed(1))
    found = FastCpuAttention(cache, 1).step(batch, lambda: None).run(0, queries, keys, values)
    pages = torch.from_numpy(batch.page_table[:, 0].astype(np.int64))
    both_keys, both_values = (stored[0][pages, 0, :2].double() for stored in (cache.keys, cache.values))
    weights = (queries.double() @ both_keys.transpose(1, 2) * head_dim**-0.5).softmax(-1)
    torch.testing.assert_close(found.double(), (weights @ both_values)[:, 0], rtol=0, atol=1.5e-6)


def fill_pages_left_behind(cache: KvCache, batch: AttentionBatch, layers) -> None:
    """Put NaN on the pages before the windows of each row's first token."""
    for layer, rules in enumerate(layers):
        for slot, start in zip(batch.row_slots, batch.row_starts, strict=True):
            before = 0 if rules.window is None else max(0, int(batch.positions[start]) + 1 - rules.window)
            pages = torch.from_numpy(batch.page_table[slot, : before // cache.page_size].astype(np.int64))
            cache.keys[layer][pages] = cache.values[layer][pages] = torch.nan


def compare_fast_and_plain(rows, heads, kv_heads, head_dim, page_size, layers=(), dtype=torch.float32) -> None:
    batch = batch_of(rows, page_size)
    tokens = len(batch.positions)
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
    queries, keys, values = projected.split((heads, kv_heads, kv_heads), dim=1)
    outputs, caches = [], []
    for make in (PlainAttention, lambda cache, layers: FastCpuAttention(cache, heads, layers)):
        cache = filled_cache(batch.page_table.size, page_size, kv_heads, head_dim, dtype)
        fill_pages_left_behind(cache, batch, layers)
        step = make(cache, layers).step(batch, lambda: None)
        outputs.append([step.run(layer, queries, keys, values) for layer in range(2)])
        caches.append(cache)
    assert all(output.isfinite().all() for output in outputs[0])
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[1].keys, caches[0].keys, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(caches[1].values, caches[0].values, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("window", [None, 1, 2, 17, 19, 40])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("scale", [8**-0.5, 0.1])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("sink", [None, 1.5])
def test_plain_attention_is_attention(tokens, window, scale, soft_cap, sink):
    """Against the formula, written out for one head."""
    batch = batch_of([(20, tokens)], 16)
    cache = filled_cache(2, 16, 1, 8)
    queries, keys, values = torch.randn(tokens, 3, 1, 8, generator=torch.Generator().manual_seed(2)).unbind(1)
    rules = LayerAttention(scale, window, soft_cap, None if sink is None else torch.tensor([sink]))
    output = PlainAttention(cache, [rules, rules]).step(batch, lambda: None).run(0, queries, keys, values)
    table = batch.page_table[0].tolist()
    all_keys, all_values = (torch.cat([stored[0][page, 0] for page in table]) for stored in (cache.keys, cache.values))
    for row, context in enumerate(range(21 - tokens, 21)):
        seen = slice(0 if window is None else max(0, context - window), context)
        scores = all_keys[seen] @ queries[row, 0] * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        total = scores.exp().sum() + (0 if sink is None else torch.tensor(sink).exp())
        torch.testing.assert_close(output[row], scores.exp() / total @ all_values[seen])


def test_long_prompts_with_sinks_and_soft_caps_are_computed_in_blocks(monkeypatch):
    batch = batch_of([(70, 60), (90, 33)], 16)
    rules = LayerAttention(0.3, 50, 2.0, torch.randn(6))
    queries, keys, values = torch.randn(93, 10, 16).split((6, 2, 2), dim=1)
    outputs = []
    for block in (256, 7):
        monkeypatch.setattr(plain, "_BLOCK", block)
        step = PlainAttention(filled_cache(12, 16, 2, 16), [rules] * 2).step(batch, lambda: None)
        outputs.append(step.run(0, queries, keys, values))
    torch.testing.assert_close(*outputs)


def test_scores_far_apart_do_not_overflow():
    batch = batch_of([(30, 1)], 16)
    cache = filled_cache(2, 16, 1, 16)
    cache.keys[0].mul_(1000)
    queries, keys, values = (torch.ones(1, heads, 16) for heads in (2, 1, 1))
    expected = PlainAttention(cache).step(batch, lambda: None).run(0, queries, keys, values)
    found = FastCpuAttention(cache, 2).step(batch, lambda: None).run(0, queries, keys, values)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("head_dim", [16, 6])
@pytest.mark.parametrize("context", [1, 2, 17, 31])
def test_what_is_behind_a_context_is_not_read(context, head_dim):
    batch = batch_of([(context, 1)], 16)
    cache = filled_cache(batch.page_table.size, 16, 1, head_dim)
    queries, keys, values = (torch.ones(1, heads, head_dim) for heads in (2, 1, 1))
    run = FastCpuAttention(cache, 2).step(batch, lambda: None).run
    expected = run(0, queries, keys, values)
    for stored in (cache.keys[0], cache.values[0]):
        stored[batch.page_table[0, -1], :, (context - 1) % 16 + 1 :] = float("nan")
    assert run(0, queries, keys, values).equal(expected)


@pytest.mark.parametrize("head_dim", quick_if(lambda head_dim: head_dim == 24, [64, 24, 4]))
def test_the_score_of_a_token_does_not_depend_on_the_scores_that_are_computed_with_it(head_dim):
    """The first page of 17 tokens is scored at once in a page of 16 tokens, and token by token in pages of one."""
    outputs = []
    for page_size in (1, 16):
        batch = batch_of([(17, 1)], page_size)
        cache = KvCache(
            layers=1, page_count=17, page_size=page_size, kv_heads=1, head_dim=head_dim, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        tokens = torch.randn(2, 17, head_dim, generator=torch.Generator().manual_seed(2))
        for position in range(17):
            page, offset = int(batch.page_table[0, position // page_size]), position % page_size
            cache.keys[0][page, 0, offset], cache.values[0][page, 0, offset] = tokens[:, position]
        queries, (keys, values) = tokens[0, :2].unsqueeze(0), tokens[:, 16:].unsqueeze(2)
        outputs.append(FastCpuAttention(cache, 2).step(batch, lambda: None).run(0, queries, keys, values))
    assert outputs[0].equal(outputs[1])


def test_keys_that_are_not_numbers_reach_their_own_row_only():
    batch = batch_of([(20, 1), (20, 1)], 16)
    cache = filled_cache(4, 16, 1, 16)
    for stored in (cache.keys[0], cache.values[0]):
        stored[batch.page_table[0, 0]] = float("nan")
    queries, keys, values = (torch.ones(2, heads, 16) for heads in (2, 1, 1))
    output = FastCpuAttention(cache, 2).step(batch, lambda: None).run(0, queries, keys, values)
    assert output.isfinite().all(dim=1).tolist() == [False, True]


def test_each_device_and_dtype_gets_its_backend():
    assert isinstance(make_attention(filled_cache(1, 16, 1, 16), 2), FastCpuAttention)
    narrow = filled_cache(1, 16, 1, 16, torch.bfloat16)
    assert isinstance(make_attention(narrow, 2), PlainAttention)
    assert isinstance(make_attention(narrow, 2, dtype=torch.float32), FastCpuAttention)
