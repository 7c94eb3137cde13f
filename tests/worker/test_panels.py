"""Weights in panels on CPUs with activations in float32, against plain layers with the same weights."""

import pytest
import torch

from services.worker.layers import pairs_cpu, products_cpu, tiles_cpu
from services.worker.layers.panels import PanelLinear
from tests.quick import quick_if
from tests.worker.other_processors import compiled_for
from tests.worker.test_quantization import fill

OUTPUTS = [64, [40, 30], [128, 64, 64], 1]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, "none", 4),
        (torch.float32, "none", 1),
        (torch.bfloat16, "tiles", 4),
        (torch.bfloat16, "pairs", 4),
        (torch.bfloat16, "none", 4),
        (torch.bfloat16, "none", 1),
    ],
    ids=[
        "float32",
        "float32, few registers",
        "bfloat16, tiles",
        "bfloat16, pairs",
        "bfloat16, widened",
        "bfloat16, few registers",
    ],
)
def dtype(request):
    """Compile products for processors with different instructions for bfloat16, and with few registers.

    Return the dtype of weights.
    """
    stored, instructions, rows = request.param
    tiles, pairs = instructions == "tiles", instructions == "pairs"
    if (tiles and not tiles_cpu.multiplies_tiles()) or (pairs and not pairs_cpu.multiplies_bfloat16()):
        pytest.skip(f"this processor has no instructions for {instructions} of bfloat16")
    with compiled_for(rows=rows, tiles=tiles, pairs=pairs):
        yield stored


@pytest.mark.parametrize("outputs", quick_if(lambda outputs: outputs in (1, [40, 30]), OUTPUTS))
@pytest.mark.parametrize("inputs", [2, 300, pytest.param(1026, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", quick_if({1, 3, 5, 8, 33, 130}.__contains__, [1, 2, 3, 4, 5, 7, 8, 13, 33, 130]))
def test_a_product_is_that_of_rounded_values(rows, inputs, outputs, dtype):
    width = outputs if isinstance(outputs, int) else sum(outputs)
    x, weight, bias = random(rows, inputs, seed=1), random(width, inputs), random(width, seed=2)
    linear = fill(PanelLinear(inputs, outputs, bias=True, dtype=dtype), weight, bias)
    expected = x.to(dtype).float() @ weight.to(dtype).float().t() + bias
    torch.testing.assert_close(linear(x), expected, atol=2e-4, rtol=0)
    total = random(rows, width, seed=3)
    assert linear(x, total) is total
    torch.testing.assert_close(total, random(rows, width, seed=3) + expected, atol=2e-4, rtol=0)


def test_a_row_has_the_same_result_among_any_rows(dtype):
    """Processors with few registers multiply 32 or more rows of float32 with torch's library, whose results differ."""
    rows = 31 if dtype == torch.float32 and products_cpu.most_rows() == 1 else 37
    linear, x = fill(PanelLinear(300, 100, dtype=dtype), random(100, 300), None), random(rows, 300, seed=1)
    together = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(rows))
    assert torch.equal(linear(x[3:23]), together[3:23])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_reaches_its_own_row_or_output_only(bad, dtype):
    weight, x = random(10, 64), random(3, 64, seed=1)
    weight[3, 40] = bad
    linear = fill(PanelLinear(64, 10, dtype=dtype), weight, None)
    assert linear(x).isfinite().all(dim=0).tolist() == [i != 3 for i in range(10)]
    x[1, 7] = bad
    linear = fill(PanelLinear(64, 10, dtype=dtype), random(10, 64), None)
    assert linear(x).isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_stored_and_read_by_part(stored):
    linear, weight = PanelLinear(6, [70, 30], dtype=stored), random(100, 6)
    fill(linear, weight, None)
    rows = torch.empty(20, 6)
    linear.targets("first", "second")["second.weight"].copy_to(rows)
    assert torch.equal(rows, weight[70:90].to(stored).float())
    assert torch.equal(linear.columns(torch.tensor([99, 0])), weight[[99, 0]].to(stored))
