"""Many rows attend to the prefixes that they share: how they are divided, and the kernels of Hopper."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.attention.base import LayerAttention
from services.worker.attention.spans import Spans
from services.worker.layers.fp8 import FP8
from tests.worker.attention_case import Case, put
from tests.worker.interpreter import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

PAGE = 16


def spans(counts, pages, gap=0) -> Spans:
    """Return spans of ``counts`` rows that share ``pages`` pages, ``gap`` rows apart. Span i uses slot i."""
    columns = (np.cumsum(counts) - counts + gap * np.arange(len(counts)), counts, range(len(counts)))
    return Spans(*(np.array(column, np.int32) for column in (*columns, np.asarray(pages) * PAGE)))


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([3, 16, 48]),
    st.sampled_from([16, 64, 128]),
)
def test_each_row_is_in_one_tile_and_each_page_is_copied_once(sizes, tokens, keys):
    from services.worker.attention.triton_prefixes import prefix_tiles

    counts, pages = np.array(sizes).T
    made = spans(counts, pages, gap=2)
    fields = prefix_tiles(made, tokens, keys, PAGE)
    copied = -(-made.contexts // keys) * keys
    for span in range(len(counts)):
        own = fields[fields[:, 2] == span]
        rows = [np.arange(first, first + count) for first, count in own[:, :2]]
        assert np.concatenate(rows).tolist() == list(range(made.starts[span], made.starts[span] + counts[span]))
        assert own[:, 1].max() <= tokens
        assert (own[:, 3:5] == (made.contexts[span], copied[:span].sum())).all()
        places = [np.arange(first, first + count) for first, count in own[:, 5:]]
        assert np.concatenate(places).tolist() == list(range(copied[span] // PAGE))


@pytest.mark.parametrize(("cached", "dtype"), [(FP8, torch.float16), (torch.float32, torch.float32)])
def test_pages_are_copied_behind_each_other_with_zeros_at_the_end(cached, dtype):
    from services.worker.attention.triton_prefixes import FIELDS, copy_prefixes, prefix_tiles

    kv_heads, head_dim, capacity = 2, 8, 256
    noise = torch.randn(2, 20, kv_heads, PAGE, head_dim).to(cached)
    table = np.random.default_rng(0).permutation(20).astype(np.int32).reshape(2, 10)
    made = spans([5, 40], [3, 9])
    fields = put(prefix_tiles(made, 16, 64, PAGE))
    rows = torch.full((2, kv_heads * capacity, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    copy_prefixes[(len(fields) * kv_heads,)](
        *noise.to(DEVICE), fields, put(table), *rows, table.shape[1], capacity, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        PAGE=PAGE, FIELDS=FIELDS,
    )  # fmt: skip
    found = rows.cpu().view(2, kv_heads, capacity, head_dim)
    first = 0
    for span, context in enumerate(made.contexts.tolist()):
        pages = noise.float()[:, table[span, : context // PAGE].astype(np.int64)].transpose(1, 2).flatten(2, 3)
        last = first + -(-context // 64) * 64
        assert torch.equal(found[:, :, first : first + context].float(), pages)
        assert not found[:, :, first + context : last].any()
        first = last
    assert found[:, :, first:].isnan().all()


@pytest.fixture
def on_hopper(monkeypatch):
    from services.worker.attention import triton_prefixes

    monkeypatch.setattr(triton_prefixes, "is_hopper", lambda _: True)


def test_many_rows_of_full_tiles_are_taken_if_the_copies_have_room():
    from services.worker.attention.triton_prefixes import WidePrefixes

    case = Case([20], heads=32, kv_heads=8, head_dim=64)
    prefixes = WidePrefixes(case.cache(torch.bfloat16, DEVICE), 32, torch.bfloat16)
    assert not prefixes.takes(spans([3839], [10]))
    assert prefixes.takes(spans([3840], [10]))
    assert prefixes.takes(spans([256] * 15, [10] * 15))
    assert not prefixes.takes(spans([13] * 300, [10] * 300))
    assert prefixes.takes(spans([2000] * 4, [512] * 4))
    assert not prefixes.takes(spans([2000] * 4, [512] * 3 + [513]))


@pytest.mark.parametrize(
    ("supported", "changes"),
    [
        (True, {}), (True, {"head_dim": 128}), (True, {"kv_heads": 32}), (True, {"kv_heads": 1}), (True, {"page": 8}),
        (True, {"window": 5}), (False, {"head_dim": 32}), (False, {"heads": 24}), (False, {"page": 4}),
        (False, {"page": 256}), (False, {"soft_cap": 30.0}), (False, {"dtype": torch.float32}),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_and_rules_that_the_kernel_lacks_are_not_for_it(on_hopper, supported, changes):
    """A layer with a window has no shared prefixes, so that its rules do not matter."""
    case = Case([20], **{"heads": 32, "kv_heads": 8, "head_dim": 64, "dtype": torch.bfloat16} | changes)
    attention = case.attention(case.cache(case.dtype, DEVICE), backend=None)
    assert (attention.wide_prefixes is not None) == supported


def test_no_memory_is_reserved_if_steps_have_too_few_rows(on_hopper):
    from services.worker.attention.triton_prefixes import WidePrefixes

    case = Case([20], heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    cache = case.cache(case.dtype, DEVICE)
    assert WidePrefixes.supports(cache, 32, case.dtype, case.layers[0], 2048)
    assert not WidePrefixes.supports(cache, 32, case.dtype, case.layers[0], 2047)


def test_a_chosen_backend_is_used_alone(on_hopper):
    case = Case([20], heads=32, kv_heads=8, head_dim=64, dtype=torch.bfloat16)
    assert case.attention(case.cache(case.dtype, DEVICE), backend="triton").wide_prefixes is None


MANY = 1 << 20  # rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 64), (16, 4, 128), (8, 8, 64), (64, 1, 128), (16, 1, 64), (8, 4, 128)]
)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, FP8], ids=["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("programs", [132, 3])
def test_the_kernel_gives_what_that_of_triton_gives(monkeypatch, programs, kind, heads, kv_heads, head_dim):
    """Include prefixes that end within a block of keys, partly filled tiles, and programs with several units.

    Values outside of the prefixes and rows between spans are NaN, and so are the values of one prefix.
    """
    from services.worker.attention import triton_prefixes
    from services.worker.attention.triton_spans import TritonSpans

    dtype = torch.bfloat16 if kind == FP8 else kind
    monkeypatch.setattr(triton_prefixes, "multiprocessors", lambda _: programs)
    case = Case([20], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    cache, rules = case.cache(dtype, DEVICE), LayerAttention(0.7 * head_dim**-0.5)
    if not triton_prefixes.WidePrefixes.supports(cache, heads, dtype, rules, MANY):
        pytest.skip("this GPU has no tensor cores of Hopper")
    made = spans([200, 1, 77, 96, 30], [1, 53, 8, 16, 20], gap=3)
    rows, table = int(made.starts[-1] + made.counts[-1]), torch.randperm(5 * 60).view(5, 60).int()
    queries = torch.full((rows, heads, head_dim), torch.nan, dtype=dtype)
    keys, values = torch.full((2, 300, kv_heads, PAGE, head_dim), torch.nan)
    for start, count, slot, context in zip(made.starts, made.counts, made.slots, made.contexts, strict=True):
        queries[start : start + count] = 3 * torch.randn(count, heads, head_dim)
        pages = table[slot, : context // PAGE].long()
        keys[pages] = torch.randn(len(pages), kv_heads, PAGE, head_dim)
        if slot < 4:
            values[pages] = torch.randn(len(pages), kv_heads, PAGE, head_dim)
    queries, keys, values, table = (each.to(DEVICE) for each in (queries, keys.to(kind), values.to(kind), table))
    wide = triton_prefixes.WidePrefixes(cache, heads, dtype).plan(made, table, put)
    wide.copies.fill_(torch.nan)
    results = []
    for backend in (wide, TritonSpans(heads // kv_heads, head_dim, dtype, causal=False).plan(made, table, None, put)):
        output = torch.full_like(queries, 7.0)
        lse = torch.full((rows, heads), 7.0, device=DEVICE)
        backend.run(queries, keys, values, output, lse, rules)
        results.append((output.float(), lse))
    torch.testing.assert_close(results[0], results[1], atol=2e-2, rtol=2e-2, equal_nan=True)
    output, _ = results[0]
    assert (output == 7.0).all(dim=2).all(dim=1).sum() == 12  # the rows between spans
    assert output[-30:].isnan().all()
    assert not output[:-30].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_step_continues_from_wide_prefixes(monkeypatch, head_dim, cached):
    from services.worker.attention import triton_prefixes

    any_rows = {size: options._replace(fewest_rows=1) for size, options in triton_prefixes.OPTIONS.items()}
    monkeypatch.setattr(triton_prefixes, "OPTIONS", any_rows)
    monkeypatch.setattr(triton_prefixes, "_FULL", 0.0)
    runs, run = [], triton_prefixes.PlannedPrefixes.run
    monkeypatch.setattr(
        triton_prefixes.PlannedPrefixes, "run", lambda self, *values: runs.append(1) or run(self, *values)
    )
    sizes = {"heads": 16, "kv_heads": 4, "head_dim": head_dim, "dtype": torch.bfloat16, "cached": cached}
    contexts = [300 + row for row in range(120)]
    case = Case(contexts, [(64, 10)], groups=((0, 70, 18), (75, 45, 3)), **sizes)
    if not triton_prefixes.WidePrefixes.supports(case.cache(cached, DEVICE), 16, case.dtype, case.layers[0], MANY):
        pytest.skip("this GPU has no tensor cores of Hopper")
    case.check_fp8(backend=None) if cached == FP8 else case.check(backend=None)
    assert runs
