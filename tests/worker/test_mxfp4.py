"""Values of MXFP4."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.mxfp4 import as_scales, from_mxfp4, to_mxfp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def as_values(rows: torch.Tensor) -> torch.Tensor:
    codes, exponents = to_mxfp4(rows)
    return from_mxfp4(codes) * as_scales(exponents).repeat_interleave(32, dim=1)


@given(
    codes=st.lists(st.sampled_from(VALUES), min_size=32, max_size=32),
    signs=st.integers(0, 2**32 - 1),
    exponent=st.integers(-90, 90),
)
def test_values_of_the_format_do_not_change(codes, signs, exponent):
    """Also of groups in which the largest values do not occur."""
    sign = torch.tensor([-1.0 if signs >> index & 1 else 1.0 for index in range(32)])
    rows = (torch.tensor(codes) * sign * 2.0**exponent).unsqueeze(0)
    assert torch.equal(as_values(rows), rows)


def test_other_values_are_rounded_to_the_nearest():
    rows = torch.tensor([[6.0, 0.2, 0.3, 0.8, -1.2, 1.3, 1.7, 1.8, 2.4, 2.6, -3.4, 3.6, 4.9, 5.1, *[0.0] * 18]])
    expected = [6.0, 0.0, 0.5, 1.0, -1.0, 1.5, 1.5, 2.0, 2.0, 3.0, -3.0, 4.0, 4.0, 6.0, *[0.0] * 18]
    assert as_values(rows)[0].tolist() == expected


def test_values_that_are_not_finite_stay_visible_in_their_group():
    for value in (torch.nan, torch.inf):
        rows = torch.ones(1, 64)
        rows[0, 3] = value
        found = as_values(rows)
        assert not found[0, :32].isfinite().any() or value == torch.inf
        assert not found[0, 3].isfinite()
        assert torch.equal(found[0, 32:], rows[0, 32:])


def test_zeros_stay_zeros():
    assert torch.equal(as_values(torch.zeros(2, 32)), torch.zeros(2, 32))


def test_a_layer_gives_what_its_values_give():
    linear = GroupedLinear(96, (8, 4), bits=4, group=32, floats=True)
    weight = torch.randn(12, 96, generator=torch.Generator().manual_seed(0))
    for name, part in (("a", weight[:8]), ("b", weight[8:])):
        linear.targets("a", "b")[f"{name}.weight"].copy_(part)
    assert linear.scales.dtype == torch.uint8
    assert torch.equal(linear.dequantized(), as_values(weight))
    x = torch.randn(3, 96)
    torch.testing.assert_close(linear(x), x @ as_values(weight).t())


def test_layers_have_no_product_on_gpus():
    pytest.importorskip("triton")
    from services.worker.layers.triton_grouped import grouped_product

    linear = GroupedLinear(64, 8, bits=4, group=32, floats=True)
    with pytest.raises(TypeError, match="no product of a linear layer with weights in MXFP4"):
        grouped_product(torch.ones(1, 64), linear.codes, linear.scales, None, None, 4)


@pytest.mark.parametrize("wrong", [{"bits": 8}, {"group": 64}, {"offsets": True}])
def test_other_forms_of_mxfp4_are_refused(wrong):
    with pytest.raises(ValueError, match="in MXFP4: expected 4 bits, groups of 32 inputs and no offsets"):
        GroupedLinear(64, 8, **{"bits": 4, "group": 32, "floats": True} | wrong)
