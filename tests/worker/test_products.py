"""Products in vector instructions, against torch's."""

import numba
import numpy as np
import pytest
import torch

from services.worker.layers import matmul_cpu, products_cpu
from services.worker.layers.fast_cpu import FastCpuKernels
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.panels import PanelLinear
from tests.worker.test_quantization import fill

assert matmul_cpu.available()
SIZES = [(576, 960), (20, 64), (64, 70), (1, 128), (1030, 64)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=[1, 4], ids=["few registers", "many registers"])
def multiply(request):
    """Return a compiled function that calls the product of float32 weights."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(products_cpu, "most_rows", lambda: request.param)
        product = products_cpu.make_product.__wrapped__("float32")

    @numba.njit
    def call(x, weight, output, keep):
        product(x, weight.ctypes.data, 0, output, np.float32(keep))
        return weight.size  # numba would otherwise free it too early

    return call


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 33])
def test_a_product_is_that_of_torch(rows, inputs, outputs, multiply):
    x, weight, total = random(rows, inputs), random(outputs, inputs, seed=1), random(rows, outputs, seed=2)
    panels = fill(PanelLinear(inputs, outputs), weight).weight.numpy()
    for keep in (0, 1):
        output = total.clone()
        multiply(x.numpy(), panels, output.numpy(), keep)
        torch.testing.assert_close(output, x @ weight.t() + keep * total, atol=1e-3, rtol=0)


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
def test_a_projection_by_the_embedding_is_that_of_torch(rows):
    hidden, embedding = random(2 * rows, 64)[::2], random(333, 64, seed=1)
    expected = TorchKernels().project(hidden, embedding)
    torch.testing.assert_close(FastCpuKernels().project(hidden, embedding), expected, atol=1e-4, rtol=0)
