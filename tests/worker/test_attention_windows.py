"""Layers with a sliding window attend to the window's tokens, in every kernel."""

import pytest
import torch

from services.worker.attention.base import LayerAttention
from services.worker.layers.fp8 import FP8
from tests.quick import quick_if
from tests.worker.attention_case import without_pages_left_behind
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.test_attention_kernels import MANY, Case, bf16_dots, decode_with

__all__ = ["bf16_dots"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

WINDOWS = [1, 2, 16, 31, 64, 100]
CONTEXTS = [1, 16, 17, 33, 70, 130]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "page", [pytest.param(1, marks=pytest.mark.slow), 16, pytest.param(64, marks=pytest.mark.slow)]
)
def test_rows_of_one_token_see_their_last_tokens(window, page):
    Case(CONTEXTS, page=page, window=window, padding=1).check()


@pytest.mark.parametrize("page", [4, 16, 64])
def test_tiles_are_of_many_pages_or_a_part_of_one(monkeypatch, page):
    decode_with(monkeypatch, *MANY)
    Case(CONTEXTS, page=page, window=21, dtype=torch.float16).check()


@pytest.mark.parametrize("splits", [2, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [5, 100, 250])
def test_programs_that_share_a_row_agree_with_one(window, splits):
    Case([260, 65, 3, 100], window=window, padding=1).check(splits=splits)


@pytest.mark.parametrize("window", quick_if(lambda window: window in {1, 33}, [1, 7, 32, 33, 60]))
@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_tokens_of_chunks_see_their_last_tokens(window, page):
    Case([], [(16, 16), (17, 2), (70, 37), (33, 33), (32, 15), (100, 2), (90, 90)], page=page, window=window).check()


@pytest.mark.parametrize("layer", [0, 1], ids=["full", "windowed"])
def test_rows_of_a_group_do_not_see_the_part_of_the_prefix_before_their_window(layer):
    Case([65, 66, 80, 70, 64], groups=((0, 3, 2), (3, 2, 1)), heads=6, window=40).check(layer)


@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("cached", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "windowed"])
def test_a_step_with_everything(layer, cached):
    case = Case(
        [50, 40, 1, 70, 65], [(64, 10), (31, 31)], ((0, 2, 1), (3, 2, 3)), heads=8, kv_heads=2, head_dim=64,
        dtype=torch.bfloat16, cached=cached, padding=2, norm=True, window=24,
    )  # fmt: skip
    case.check(layer) if cached is None else case.check_fp8(layer)


def test_scores_far_apart_do_not_overflow():
    case = Case([40, 40], [(90, 50)], window=20)
    case.noise[:, 0] *= 1000
    case.check()


@pytest.mark.parametrize("window", quick_if(lambda window: window in {1, 17, 40}, [1, 5, 17, 32, 40, 70]))
@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)])
def test_pages_left_behind_are_not_read(window, page):
    chunks = [(17, 2), (70, 37), (33, 33), (130, 15), (100, 2), (90, 90), (161, 1)]
    without_pages_left_behind(Case([1, 33, 70, 130], chunks, page=page, window=window), window).check()
    without_pages_left_behind(Case([130, 33, 161], page=page, window=window), window).check(splits=3)


@pytest.mark.parametrize("page", [4, 16])
def test_large_tiles_do_not_read_pages_left_behind(monkeypatch, page):
    decode_with(monkeypatch, *MANY)
    case = Case(CONTEXTS, [(300, 40)], page=page, window=21, dtype=torch.float16)
    without_pages_left_behind(case, 21).check()


def test_flashinfer_is_not_asked_for_chunks_with_windows(monkeypatch):
    from services.worker.attention import cuda

    monkeypatch.setattr(cuda.flashinfer_spans, "available", lambda *_: True)
    monkeypatch.setattr(cuda.CudaAttention, "_spans", lambda self, name, causal: name)
    case = Case([20], head_dim=128, dtype=torch.bfloat16)
    backends = {}
    for windows in ((None, None), (None, 8), (8, 8)):
        cache = case.cache(torch.bfloat16, DEVICE)
        attention = cuda.CudaAttention(
            cache, case.heads, case.rotaries, layers=[LayerAttention(1.0, window) for window in windows]
        )
        backends[windows] = attention.prefix_names, attention.chunk_names, attention.shares_prefixes
    assert backends == {
        (None, None): (["flashinfer-fa3"] * 2, ["flashinfer-fa3"] * 2, True),
        (None, 8): (["flashinfer-fa3", None], ["flashinfer-fa3", "triton"], True),
        (8, 8): ([None, None], ["triton"] * 2, False),
    }


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "windowed"])
def test_long_contexts_beyond_a_window(layer, dtype, head_dim):
    Case(
        [9000, 40, 4097, 8191], [(5000, 700), (300, 300)], ((0, 2, 2),), heads=8, kv_heads=2, head_dim=head_dim,
        dtype=dtype, window=4096,
    ).check(layer)  # fmt: skip
