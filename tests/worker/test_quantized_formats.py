"""The formats of ``bench.quantized_formats``."""

import pytest
import torch

from bench.quantized_formats import FORMATS, apply
from tests.worker.small_models import small_config, small_model

EIGHT_BITS = ("fp8_tensor", "fp8_row", "fp8_block", "int8_row", "q8_0")


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_rounded_within_a_step_of_the_largest_one(name):
    matrix = torch.randn(70, 160, generator=torch.Generator().manual_seed(0))  # blocks need not divide the sizes
    matrix[3] = 0
    found = FORMATS[name].weights(matrix)
    assert found.shape == matrix.shape
    assert (found[3] == 0).all()
    largest = matrix.abs().max()
    assert (found - matrix).abs().max() <= largest * (1 / 16 if name in EIGHT_BITS else 1 / 4)


def test_only_the_layers_are_rounded():
    model, expected = (small_model(small_config()) for _ in range(2))
    apply(FORMATS["int4_32"], model)
    assert torch.equal(model.embedding, expected.embedding)
    assert not torch.equal(model.layers[0].mlp.down.weight, expected.layers[0].mlp.down.weight)
