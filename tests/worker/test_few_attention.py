"""Attention of few rows in one kernel gives what plain torch gives."""

import pytest
import torch

from services.worker.layers.fp8 import FP8
from tests.worker.attention_case import without_pages_left_behind
from tests.worker.interpreter import DEVICE, needs_triton
from tests.worker.test_attention_kernels import Case, bf16_dots

__all__ = ["bf16_dots"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]


class FewCase(Case):
    """Decode rows only."""

    def found(self, layer: int, splits: int = 1, options=None):
        """All tokens' output on the CPU, and the cache."""
        from services.worker.attention.triton_few import MOST_ROWS, few_attention

        cache, batch = self.cache(self.cached, DEVICE), self.batch()
        arrivals = torch.zeros(MOST_ROWS * self.kv_heads, dtype=torch.int32, device=DEVICE)
        rules = self.device_layers()[layer]
        tables = None
        if rules.rope is not None:
            tables = self.rotaries[rules.rope].cos.to(DEVICE), self.rotaries[rules.rope].sin.to(DEVICE)
        output = torch.full((self.tokens, self.heads, self.head_dim), torch.nan, dtype=self.dtype, device=DEVICE)
        few_attention(
            self.qkv.to(DEVICE), batch.token_slots, batch.positions, batch.page_table, tables, self.device_norms(),
            cache.keys[layer], cache.values[layer], output, arrivals, rules, splits=splits,
            options=options,
        )  # fmt: skip
        assert not arrivals.any()
        return output.flatten(1).cpu(), cache


def options(tile: int):
    from services.worker.attention.triton_few import FewOptions

    return FewOptions(tile, 4, 3)


CONTEXTS = [1, 2, 16, 17, 40, 130]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (3, 3, 16), (10, 2, 32), (16, 1, 128)])
@pytest.mark.parametrize("page", [1, 16])
def test_rows_see_their_context_and_themselves(heads, kv_heads, head_dim, page):
    FewCase(CONTEXTS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page).check()


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_the_last_program_of_a_row_merges_what_all_found(splits):
    FewCase(CONTEXTS).check(splits=splits, options=options(16))


def test_more_parts_than_are_merged_at_once(monkeypatch):
    from services.worker.attention import triton_few

    monkeypatch.setattr(triton_few, "_MERGED", 2 * 2 * 16)
    FewCase([300, 5]).check(splits=19, options=options(16))


@pytest.mark.parametrize("splits", [1, 2])
def test_queries_and_keys_are_normed_and_rotated(splits):
    FewCase(CONTEXTS, norm=True).check(splits=splits, options=options(16))


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_stores_nothing_and_gives_zeros(splits):
    FewCase([9, 70, 5], holes=[0, 1], padding=3).check(splits=splits, options=options(16))


@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("splits", [1, 3])
def test_a_model_of_bf16(splits):
    FewCase([33, 1, 140], dtype=torch.bfloat16).check(splits=splits, options=options(32))


def test_a_model_of_fp16():
    FewCase([33, 1, 140], dtype=torch.float16).check(splits=3, options=options(32))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_cache_of_fp8_is_attended_to_as_it_was_rounded(splits):
    FewCase([33, 1, 140], cached=FP8).check_fp8(splits=splits, options=options(32))


def test_programs_are_shared_by_short_contexts_only_as_far_as_that_pays():
    from services.worker.attention.triton_few import choose_splits

    lengths = (1, 129, 512, 4096, 1 << 17)
    found = [choose_splits(pairs, longest, 4 * 132) for pairs in (8, 64, 128) for longest in lengths]
    assert found == [1, 1, 4, 32, 32, 1, 1, 4, 8, 8, 1, 1, 4, 4, 4]


@pytest.mark.parametrize(
    ("pairs", "head_dim", "cached", "expected"),
    [
        (8, 64, torch.bfloat16, (128, 4, 6)),
        (128, 64, torch.bfloat16, (128, 4, 6)),
        (8, 128, torch.bfloat16, (64, 2, 4)),
        (128, 128, torch.bfloat16, (64, 2, 4)),
        (128, 256, torch.bfloat16, (32, 4, 3)),
        (32, 64, FP8, (128, 4, 2)),
        (40, 64, FP8, (32, 1, 8)),
        (32, 128, FP8, (64, 4, 2)),
        (40, 128, FP8, (16, 1, 8)),
        (40, 256, FP8, (32, 4, 3)),
        (8, 16, torch.bfloat16, (128, 4, 6)),
    ],
)
def test_options_depend_on_the_heads_and_the_cache(pairs, head_dim, cached, expected):
    from services.worker.attention.triton_few import choose_options

    assert choose_options(pairs, head_dim, cached) == expected


@pytest.mark.parametrize("cached", [torch.bfloat16, FP8])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_a_warp_holds_few_enough_elements_of_a_tile(head_dim, cached):
    from services.worker.attention.triton_few import MOST_ROWS, choose_options

    for rows in range(1, MOST_ROWS + 1):
        options = choose_options(rows * 8, head_dim, cached)
        assert 16 <= options.tile <= 128
        assert options.tile * head_dim // options.warps <= 4096


def test_layers_of_a_step_run_one_after_the_other(monkeypatch):
    from services.worker.attention.cuda import FewRowsStep
    from services.worker.attention.triton_few import MOST_ROWS

    case = FewCase(CONTEXTS, norm=True)
    batch, cache = case.batch(), case.cache(torch.float32, DEVICE)
    arrivals = torch.zeros(MOST_ROWS * case.kv_heads, dtype=torch.int32, device=DEVICE)
    attention = case.attention(cache)
    monkeypatch.setattr(attention, "layer_splits", lambda *_: [2, 2])
    step = FewRowsStep(attention, batch, arrivals)
    for layer in (0, 1):
        expected, stored = case.expected(layer)
        output = step.run_qkv(layer, case.qkv.to(DEVICE), case.device_norms()).cpu()
        torch.testing.assert_close(output[case.places], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cache.keys[layer].cpu(), stored.keys[layer], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 16, 33, 129, 200])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_a_layer_with_a_window_see_their_last_tokens(window, splits):
    case = without_pages_left_behind(FewCase([*CONTEXTS, 129, 300], window=window, padding=1), window)
    case.check(splits=splits, options=options(16))


@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("cached", [None, FP8], ids=["bf16", "fp8"])
def test_windows_of_a_model_of_bf16(cached):
    case = FewCase([33, 1, 140], dtype=torch.bfloat16, cached=cached, window=50)
    case.check(splits=2, options=options(32)) if cached is None else case.check_fp8(splits=2, options=options(32))
