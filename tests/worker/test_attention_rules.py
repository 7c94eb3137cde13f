"""Scales, soft caps, sinks and rotations of layers, in every kernel."""

import pytest
import torch

from services.worker.layers.fp8 import FP8
from tests.quick import quick_if
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.test_attention_kernels import MANY, Case, bf16_dots, decode_with
from tests.worker.test_few_attention import FewCase, options

__all__ = ["bf16_dots"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

RULES = {
    "scale": {"scale": 0.4},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "other rotation": {"rope": 1},
    "no rotation": {"rope": None},
    "gemma 2": {"scale": 0.3, "soft_cap": 2.0, "window": 21},
    "gpt-oss": {"sinks": True, "window": 21},
    "everything": {"scale": 0.4, "soft_cap": 2.0, "sinks": True, "rope": 1},
}
each_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
few_rules = pytest.mark.parametrize("rules", [RULES["gpt-oss"], RULES["everything"]], ids=["windowed", "full"])
CONTEXTS = [1, 16, 17, 33, 70, 130]
GROUPS = (0, 3, 2), (3, 2, 1)
HALF = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}


@each_rule
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_rows_of_one_token(rules, norm):
    Case(CONTEXTS, heads=6, padding=1, norm=norm, **rules).check()


@each_rule
@pytest.mark.parametrize("splits", [2, pytest.param(32, marks=pytest.mark.slow)])
def test_programs_that_share_a_row_count_its_sinks_once(rules, splits):
    Case([260, 65, 3, 100], heads=6, padding=1, **rules).check(splits=splits)


@few_rules
@pytest.mark.parametrize("groups", [GROUPS, ((0, 1, 2), (4, 1, 3))], ids=["all", "gaps"])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_a_group_count_their_sinks_once(rules, groups, splits):
    Case([65, 66, 80, 70, 64], groups=groups, heads=6, **rules).check(splits=splits)


@pytest.mark.parametrize("rules", quick_if(lambda rules: rules.keys() & {"window", "rope"}, RULES.values()), ids=RULES)
@pytest.mark.parametrize("page", quick_if(lambda page: page == 16, [1, 16]))
def test_chunks(rules, page):
    chunks = [(16, 16), (17, 2), (70, 37), (33, 33), (32, 15), (100, 2)]
    Case([], chunks, heads=6, page=page, **rules).check()


@each_rule
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_few_rows(rules, splits):
    FewCase([*CONTEXTS, 129], heads=6, padding=1, **rules).check(splits=splits, options=options(16))


@few_rules
def test_tiles_of_many_pages(monkeypatch, rules):
    decode_with(monkeypatch, *MANY)
    Case(CONTEXTS, page=4, dtype=torch.float16, **rules).check()


@few_rules
@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("cached", quick_if(lambda cached: cached is not None, [None, FP8]), ids=["bf16", "fp8"])
def test_a_step_with_everything(rules, cached):
    case = Case(
        [50, 40, 1, 70, 65], [(64, 10), (31, 31)], ((0, 2, 1), (3, 2, 3)), cached=cached, padding=2, norm=True,
        **HALF, **rules,
    )  # fmt: skip
    case.check() if cached is None else case.check_fp8()


@few_rules
@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("cached", [None, FP8], ids=["bf16", "fp8"])
def test_few_rows_of_a_model_of_bf16(rules, cached):
    case = FewCase([33, 1, 140], cached=cached, **HALF, **rules)
    case.check(splits=2, options=options(32)) if cached is None else case.check_fp8(splits=2, options=options(32))


@pytest.mark.parametrize("rules", [{}, RULES["everything"]], ids=["plain", "everything"])
def test_heads_of_256_dimensions(rules):
    shape = {"head_dim": 256, "dtype": torch.float16}
    Case([50, 40, 70], [(64, 10)], ((0, 2, 1),), **shape, **rules).check()
    FewCase([33, 1, 140], **shape, **rules).check(splits=2)


def test_a_large_sink_takes_all_weight_and_a_small_one_none():
    contexts, chunks, groups = [65, 66, 3], [(40, 9)], ((0, 2, 2),)
    for sink, factor in ((1e4, 0.0), (-1e4, 1.0)):
        case = Case(contexts, chunks, groups, sinks=True)
        case.layers[1].sinks.fill_(sink)
        output, _ = case.found(1)
        expected, _ = Case(contexts, chunks, groups).expected(1)
        torch.testing.assert_close(output, factor * expected, atol=1e-5, rtol=1e-5)


def test_scores_far_beyond_a_soft_cap_do_not_overflow():
    case = Case([40, 40], [(20, 5)], ((0, 2, 1),), soft_cap=30.0, sinks=True)
    case.noise[:, 0] *= 1e4
    case.check()


def for_heads_of(head_dim: int, rules: dict) -> dict:
    """Return ``rules`` with scores as large as those of heads of 16 elements: rounding grows with them."""
    return rules | {"scale": rules["scale"] * (16 / head_dim) ** 0.5} if "scale" in rules else rules


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@each_rule
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_rule_with_long_contexts_on_a_gpu(rules, dtype, head_dim):
    shape = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype}
    rules = for_heads_of(head_dim, rules)
    Case([9000, 40, 4097, 8191], [(5000, 700), (300, 300)], ((0, 2, 2),), **shape, **rules).check()
    if dtype == torch.bfloat16:
        FewCase([9000, 40, 4097], **shape, **rules).check(splits=8)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@each_rule
@pytest.mark.parametrize("backend", ["flashinfer-fa2", "flashinfer-fa3"])
def test_flashinfer_is_used_for_the_layers_that_it_supports(rules, backend):
    pytest.importorskip("flashinfer")
    case = Case([65, 66, 80, 70, 64], [(64, 10), (31, 31)], GROUPS, **HALF, **for_heads_of(64, rules))
    for layer in (0, 1):
        case.check(layer, backend=backend)


def test_layers_choose_their_backends(monkeypatch):
    from services.worker.attention import cuda

    monkeypatch.setattr(cuda.flashinfer_spans, "available", lambda *_: True)
    monkeypatch.setattr(cuda.CudaAttention, "_spans", lambda self, name, causal: name)
    chosen = {}
    for name, rules in RULES.items():
        case = Case([20], head_dim=128, dtype=torch.bfloat16, **rules)
        cache = case.cache(torch.bfloat16, DEVICE)
        attention = cuda.CudaAttention(cache, case.heads, case.rotaries, layers=case.layers)
        assert (attention.prefix_names[0], attention.chunk_names[0]) == ("flashinfer-fa3", "flashinfer-fa3")
        chosen[name] = attention.prefix_names[1], attention.chunk_names[1]
    fast, triton = "flashinfer-fa3", "triton"
    assert chosen == {
        "scale": (triton, triton),
        "soft cap": (triton, triton),
        "sinks": (fast, triton),
        "other rotation": (fast, fast),
        "no rotation": (fast, fast),
        "gemma 2": (None, triton),
        "gpt-oss": (None, triton),
        "everything": (triton, triton),
    }
