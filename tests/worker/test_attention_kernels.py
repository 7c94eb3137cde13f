"""Attention on CUDA gives what plain torch gives, kernel by kernel and as a whole step."""

import numpy as np
import pytest
import torch

from services.worker.attention.base import LayerAttention
from services.worker.layers.fp8 import FP8
from tests.quick import quick_if
from tests.worker.attention_case import TOLERANCE, Case, put
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]


@pytest.fixture
def bf16_dots(monkeypatch):
    """The interpreter keeps bf16 as 16-bit integers and would multiply those."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    create_dot = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest)
    )


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (3, 3, 16), (10, 2, 32), (16, 1, 128)])
@pytest.mark.parametrize("page", [1, 16, 128])
def test_rows_of_one_token_see_their_context(heads, kv_heads, head_dim, page):
    Case([1, 16, 17, 70, 33], heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page).check()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_queries_and_keys_are_normed_and_rotated(norm):
    Case([40, 7], norm=norm).check(layer=0)


def test_padding_stores_nothing_and_gives_zeros():
    Case([20, 5, 64], padding=3, holes=[1, 2]).check()
    Case([20, 5, 64], [(20, 9)], padding=4, holes=[0]).check()


# The products of fp8 are taken in float16, whatever 16-bit numbers the model has; those of float32 show more.
FP8_CACHE, HALF, SINGLE = {"dtype": torch.float16, "cached": FP8}, {"dtype": torch.float16}, {"dtype": torch.float32}


@pytest.mark.parametrize("kind", [FP8_CACHE, SINGLE], ids=["fp8", "fp32"])
@pytest.mark.parametrize("splits", [2, 3, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups", [(), ((0, 2, 2),)], ids=["alone", "with prefix"])
def test_programs_that_share_a_row_agree_with_one(splits, groups, kind):
    case = Case([260, 65, 3, 100], groups=groups, padding=1, **kind)
    case.check_fp8(splits=splits) if "cached" in kind else case.check(splits=splits)


def test_few_rows_are_split_and_long_contexts_among_more():
    from services.worker.attention.triton_decode import LONG_CONTEXT, choose_splits

    rows = (1, 8, 16, 32, 63, 64, 128, 129)
    assert [choose_splits(n, 8, LONG_CONTEXT) for n in rows] == [32, 16, 8, 1, 1, 1, 1, 1]
    assert [choose_splits(n, 8, 1 << 17) for n in rows] == [32, 32, 32, 32, 16, 16, 8, 1]
    assert [choose_splits(1, 8, longest) for longest in (1, 256, 257, 600, 1 << 17)] == [1, 1, 4, 9, 32]


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize(
    "groups", [((0, 3, 2), (3, 2, 1)), ((1, 2, 1),), ((0, 1, 2), (4, 1, 3))], ids=["all", "part", "gaps"]
)
def test_rows_go_on_from_their_shared_prefix(groups, page):
    Case([65, 66, 80, 70, 64], groups=groups, heads=6, page=page).check()


MANY = 32, 1, 3  # the options for many rows


def decode_with(monkeypatch, *options) -> None:
    """Rows of one token are attended to with these ``DecodeOptions``."""
    from services.worker.attention import triton_decode

    monkeypatch.setattr(triton_decode, "decode_options", lambda *_: triton_decode.DecodeOptions(*options))


@pytest.mark.parametrize("kind", [FP8_CACHE, HALF], ids=["fp8", "fp16"])
@pytest.mark.parametrize(
    "shape",
    [
        {"contexts": [1, 16, 17, 70, 33], "heads": 4, "kv_heads": 1, "head_dim": 64},
        {"contexts": [1, 32, 33], "heads": 3, "kv_heads": 3, "page": 1},
        {"contexts": [40, 31], "heads": 10, "kv_heads": 2, "head_dim": 32, "page": 8},
        {"contexts": [65, 7, 130], "heads": 9, "kv_heads": 1, "page": 64},
        {"contexts": [33], "heads": 8, "kv_heads": 1, "head_dim": 128, "page": 32},
        {"contexts": [20, 5, 64], "padding": 3, "holes": [1, 2]},
        {"contexts": [65, 66, 80, 70, 64], "groups": ((0, 3, 2), (3, 2, 1)), "heads": 6, "page": 4},
        {"contexts": [65, 66, 80, 70, 64], "groups": ((0, 1, 2), (4, 1, 3)), "heads": 6},
        {"contexts": [140, 130], "groups": ((0, 2, 1),), "page": 128},
    ],
    ids=["rows", "page of 1", "page of 8", "page of 64", "wide", "padding", "prefixes", "gaps", "long prefix"],
)
def test_tiles_are_of_many_pages_or_a_part_of_one(monkeypatch, kind, shape):
    decode_with(monkeypatch, *MANY)
    case = Case(**shape, **kind)
    case.check_fp8() if "cached" in kind else case.check()


def one_row(queries, keys, values) -> torch.Tensor:
    """Output for one row's ``queries [heads, head_dim]``; ``keys`` and ``values [tokens, kv_heads, head_dim]`` are such
    that fp8 holds them."""
    from services.worker.attention.triton_decode import DecodeOptions, decode_attention

    pages = [x.transpose(0, 1)[None].contiguous().to(FP8).to(DEVICE) for x in (keys, values)]
    output = torch.zeros_like(queries)[None].to(DEVICE)
    table = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    place = put(np.zeros(1, np.int32)), put(np.array([len(keys) - 1], np.int32))
    rules = LayerAttention(queries.shape[-1] ** -0.5)
    decode_attention(queries[None].to(DEVICE), *pages, *place, table, output, rules, options=DecodeOptions(*MANY))
    return output[0].cpu().float()


@pytest.mark.parametrize("size", [300, 10_000])
def test_large_queries_meet_small_keys_of_fp8(size):
    generator = torch.Generator().manual_seed(2)
    queries = (torch.randn(8, 32, generator=generator) * size).half()
    keys = torch.randint(-4, 5, (64, 2, 32), generator=generator) * 2.0**-9  # of which fp8 has no smaller
    values = torch.randn(64, 2, 32, generator=generator).to(FP8).float()
    scores = torch.einsum("hgd,thd->hgt", queries.float().view(2, 4, 32), keys) / 32**0.5
    expected = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).view(8, 32)
    torch.testing.assert_close(one_row(queries, keys, values), expected, **TOLERANCE[torch.float16])


@pytest.mark.usefixtures("bf16_dots")
def test_queries_beyond_float16_count_as_its_largest():
    keys = torch.arange(16.0)[:, None, None].expand(16, 1, 32) * 2.0**-9
    values = torch.arange(16.0)[:, None, None].expand(16, 1, 32)
    queries = torch.tensor([[1e6], [-1e6]], dtype=torch.bfloat16).expand(2, 32).contiguous()
    assert one_row(queries, keys, values)[:, 0].tolist() == [15, 0]


def test_every_number_of_fp8_is_read_as_it_is():
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float().view(1, 4, 64)
    found = one_row(torch.randn(4, 64).half(), torch.randn(1, 4, 64), values).flatten()
    numbers = values.flatten().isfinite()
    assert torch.equal(found[numbers], values.flatten()[numbers])
    if not INTERPRETED:  # which knows no NaN of eight bits
        assert found[~numbers].isnan().all()


def test_groups_larger_than_a_tile():
    Case([33] * 20 + [90], groups=((0, 20, 2),), heads=8, kv_heads=1).check()


@pytest.mark.parametrize(
    ("page", "heads", "kv_heads"),
    quick_if(
        lambda page, heads, kv_heads: (page, heads) in {(1, 3), (16, 4), (64, 2)},
        [(page, *sizes) for page in (1, 16, 64) for sizes in ((4, 2), (3, 1), (2, 2))],
    ),
)
def test_chunks_are_causal(page, heads, kv_heads):
    chunks = [(16, 16), (17, 2), (70, 37), (33, 33), (32, 15), (100, 2)]
    Case([], chunks, heads=heads, kv_heads=kv_heads, page=page).check()


@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_with_everything(dtype):
    Case(
        [50, 40, 1, 70, 65], [(64, 10), (31, 31)], ((0, 2, 1), (3, 2, 3)), heads=8, kv_heads=2, head_dim=64,
        dtype=dtype, padding=2, norm=True,
    ).check()  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        {"contexts": [1, 16, 17, 70, 33], "padding": 2},
        {"contexts": [65, 66, 80, 70, 64], "groups": ((0, 3, 2), (3, 2, 1))},
        {"contexts": [], "chunks": [(16, 16), (17, 2), (70, 37)]},
        {"contexts": [50, 40, 1], "chunks": [(64, 10)], "groups": ((0, 2, 1),), "norm": True, "holes": [2]},
    ],
    ids=["rows", "prefixes", "chunks", "everything"],
)
def test_a_cache_of_fp8_is_attended_to_as_it_was_rounded(shape):
    Case(**shape, cached=FP8, head_dim=32).check_fp8()


def test_programs_may_share_a_row_of_a_cache_of_fp8():
    Case([260, 65, 3, 100], groups=((0, 2, 2),), cached=FP8).check_fp8(splits=3)


@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("options", [MANY, None], ids=str)
def test_a_model_of_bf16_has_a_cache_of_fp8(monkeypatch, options):
    if options is not None:
        decode_with(monkeypatch, *options)
    Case(
        [50, 40, 1, 70, 65], [(64, 10), (31, 31)], ((0, 2, 1), (3, 2, 3)), heads=8, kv_heads=2, head_dim=64,
        dtype=torch.bfloat16, cached=FP8, padding=2, norm=True,
    ).check_fp8()  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_fp8_cannot_hold_becomes_its_largest_and_what_is_no_number_stays_none(dtype):
    case = Case([1, 1, 1, 1], cached=FP8, dtype=dtype)  # position 0: nothing turns
    rows = case.qkv.view(4, -1, case.head_dim)
    rows[0, case.heads :], rows[1, case.heads :], rows[2, case.heads :] = 1000.0, -1e9, torch.nan
    _, cache = case.found(0)
    for pages in (cache.keys[0], cache.values[0]):
        found = case.of_tokens(pages)
        assert (found[0] == 448).all()
        assert (found[1] == -448).all()
        assert found[3].isfinite().all()
        if not INTERPRETED:  # which knows no NaN of eight bits
            assert found[2].isnan().all()


def test_scores_far_apart_do_not_overflow():
    case = Case([40, 40], [(20, 5)], ((0, 2, 1),))
    case.noise[:, 0] *= 1000
    case.check()


def test_keys_that_are_not_numbers_reach_their_own_row_only():
    case = Case([40, 40])
    case.noise[:, :, case.plain.page_table[case.plain.row_slots[0], 0]] = float("nan")
    output, _ = case.found(0)
    assert output.isfinite().all(dim=1).tolist() == [False, True]


def test_a_compiled_model_runs_the_step_that_was_prepared_last():
    Case([20, 5], [(20, 9)]).check(compiled=True)


def test_compiled_code_takes_any_number_of_tokens():
    from services.worker.attention.compiled import TraceableRotation, activate

    class Twice:
        def run_qkv(self, layer, qkv, norms):
            return 2 * qkv[:, :4]

    activate(Twice())
    step = TraceableRotation(4)
    weight = torch.eye(4)
    compiled = torch.compile(
        lambda qkv: step.run_qkv(3, qkv, None) @ weight, backend="aot_eager", dynamic=True, fullgraph=True
    )
    for tokens, stance in ((5, "default"), (7, "fail_on_recompile"), (11, "fail_on_recompile")):
        qkv = torch.randn(tokens, 8)
        with torch.compiler.set_stance(stance):
            torch.testing.assert_close(compiled(qkv), 2 * qkv[:, :4])


def test_flashinfer_is_not_asked_for_a_cache_of_fp8(monkeypatch):
    from services.worker.attention import cuda

    monkeypatch.setattr(cuda.flashinfer_spans, "available", lambda *_: True)
    case = Case([20], head_dim=128, dtype=torch.bfloat16, cached=FP8)
    attention = cuda.CudaAttention(case.cache(FP8, DEVICE), case.heads, case.rotaries, dtype=torch.bfloat16)
    assert attention.prefix_names == attention.chunk_names == ["triton"] * 2
    assert attention.captures_groups


def test_an_unknown_backend_is_refused():
    from services.worker.attention.cuda import CudaAttention

    case = Case([20], head_dim=64, dtype=torch.bfloat16)
    attention = CudaAttention(case.cache(torch.bfloat16, DEVICE), case.heads, case.rotaries, prefixes="triton")
    with pytest.raises(ValueError, match="do: triton"):
        attention._spans("flash", causal=True)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["flashinfer-fa2", "flashinfer-fa3"])
@pytest.mark.parametrize("groups", [((0, 3, 2), (3, 2, 1)), ((0, 1, 2), (4, 1, 3))], ids=["slice", "gathered"])
def test_flashinfer_takes_prefixes_and_chunks(backend, groups):
    pytest.importorskip("flashinfer")
    Case(
        [65, 66, 80, 70, 64], [(64, 10), (31, 31)], groups, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16
    ).check(backend=backend)
