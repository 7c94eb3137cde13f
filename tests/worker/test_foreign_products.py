"""Attention in the code of a model, found from known scores, and elements of heads that add biases to scores."""

import pytest
import torch
import torch.nn.functional as F

from services.worker.models.foreign.attention import bias_elements, bias_of, digits_of
from services.worker.models.foreign.numbering import RecordedNumbering, StepNumbering, calls_of
from services.worker.models.foreign.products import OwnCode, StepProducts, replacing, rules_of, scores_of

TOKENS, HEADS = 101, 3
SLOPES = torch.tensor([0.5, 0.25, 0.0])
PLACES = torch.arange(TOKENS)
DISTANCE = PLACES[:, None] - PLACES
LATER = DISTANCE < 0


def sums_of(bias: torch.Tensor | float = 0.0, scale: float = 0.3) -> torch.Tensor:
    return (scale * scores_of(TOKENS) + torch.as_tensor(bias)).expand(HEADS, TOKENS, TOKENS).clone()


def test_scale_window_and_slopes_are_found():
    bias = SLOPES[:, None, None] * PLACES
    scale, window, slopes = rules_of(sums_of(bias).masked_fill(LATER, -1e4))
    assert scale == pytest.approx(0.3, rel=1e-6)
    assert window is None
    assert slopes == pytest.approx(SLOPES.tolist(), abs=1e-6)
    windowed = sums_of().masked_fill(LATER | (DISTANCE >= 20), -torch.inf)
    assert rules_of(windowed)[1:] == (20, [0.0] * HEADS)


@pytest.mark.parametrize(
    "sums",
    [
        sums_of(),  # later tokens
        sums_of(DISTANCE.abs() ** 0.5).masked_fill(LATER, -1e4),  # a bias by distance
        sums_of((PLACES * 0.3).bfloat16()).masked_fill(LATER, -1e4),  # a rounded one
        (5 * torch.tanh(sums_of() / 5)).masked_fill(LATER, -1e4),  # a cap
        sums_of().masked_fill(LATER | (PLACES % 7 == 3), -1e4),  # gaps
        sums_of(scale=-0.3).masked_fill(LATER, -1e4),
    ],
)
def test_other_rules_are_refused(sums):
    with pytest.raises(OwnCode):
        rules_of(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_digits_of_positions_add_a_bias_in_each_precision(dtype):
    most, scale = 50_000, 128**-0.5
    slopes = [2 ** (-8 * (head + 1) / 6) for head in range(6)]
    positions = torch.randint(most, (300,), generator=torch.Generator().manual_seed(0))
    queries = bias_of(slopes, scale, most).to(dtype).double()
    keys = digits_of(positions, bias_elements(most), dtype).double()
    expected = torch.tensor(slopes, dtype=torch.float64)[:, None] * positions
    assert torch.allclose(queries @ keys.T * scale, expected, rtol=1e-5)


def test_products_of_a_module_become_its_attention():
    queries, keys, values = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    module, given = torch.nn.Identity(), []

    def attend(*call):
        given.append(call)
        return torch.ones(1, 5, 4, 8)

    mode = StepProducts(attend)
    with replacing(mode):
        plain = torch.randn(2, 3, 3) @ torch.randn(2, 3, 3)
        mode.module = module
        scores = queries @ keys.repeat_interleave(2, dim=1).mT * 0.5 + torch.zeros(5, 5)
        attended = F.softmax(scores, dim=-1) @ values.repeat_interleave(2, dim=1)
        mode.module = None
    assert not plain.is_meta
    assert scores.is_meta
    assert torch.equal(attended, torch.ones(1, 4, 5, 8))
    [(called, query, key, value)] = given
    assert called is module
    assert torch.equal(query, queries)
    assert key.shape == value.shape == (1, 4, 5, 8)


def test_counts_of_tokens_that_are_read_are_told_from_those_that_select():
    hidden = torch.zeros(7, 4)
    with RecordedNumbering(7):
        torch.arange(4)
        counted = hidden + torch.arange(7)[:, None]
        selected = hidden[torch.arange(7)]
        changed = torch.zeros(7)
        changed[2:] = torch.arange(7)[2:]
    assert calls_of(counted) == {1}
    assert calls_of(selected) == frozenset()
    assert calls_of(changed) == {3}
    positions = torch.tensor([3, 0, 1])
    with StepNumbering({1}, positions):
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.arange(3, dtype=torch.float32).tolist() == [3.0, 0.0, 1.0]
