"""The product that gates as it writes."""

import pytest
import torch
import torch.nn.functional as F

from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

# The interpreter multiplies no bfloat16.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
INPUTS, SIZE, PROGRAMS = 160, 128, 3


def small_tiles():
    from services.worker.layers.triton_gate_up import Tiles

    return Tiles(rows=64, columns=32, inputs=64, group=2, warps=4, stages=2)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) * shape[0])).to(DEVICE, DTYPE)


@pytest.mark.parametrize("rows", [8, 64, 200])
def test_gates_are_those_of_two_products(rows):
    from services.worker.layers.triton_gate_up import gate_up

    x, weight = random(rows, INPUTS), random(2 * SIZE, INPUTS)
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=1)
    found = gate_up(x, weight, tiles=small_tiles(), programs=PROGRAMS)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("outputs", [64, 104])
@pytest.mark.parametrize("rows", [8, 200])
def test_products_need_no_round_sizes(rows, outputs):
    from services.worker.layers.triton_gate_up import product

    x, weight = random(rows, INPUTS), random(outputs, INPUTS)
    found = product(x, weight, tiles=small_tiles(), programs=PROGRAMS)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().t(), rtol=2**-7, atol=0.05)


def test_a_size_that_splits_a_tile_is_refused():
    from services.worker.layers.triton_gate_up import gate_up

    with pytest.raises(ValueError, match="48 columns are not a multiple of the tile's 32"):
        gate_up(random(8, INPUTS), random(96, INPUTS), tiles=small_tiles())
