"""The kernels between matrix products on CUDA, against plain torch."""

import pytest
import torch

from services.worker.layers.fp8 import FP8, quantize_rows
from services.worker.layers.kernels import TorchKernels
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

PLAIN = TorchKernels()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def values(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    assert rows.dtype == FP8
    assert scale.shape == (rows.shape[0], 1)
    return rows.float() * scale


def near(found, expected) -> None:
    """The same numbers of eight bits, but for a few on CUDA that lie between two of them, and for those that the
    interpreter does not round as the hardware does."""
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0)
    same = (values(*found) - values(*expected)).abs() < 1e-6
    assert same.float().mean() > (0.9 if INTERPRETED else 0.99)


ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped_swiglu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [16, 48, 2100])
def test_the_gate(size, activation):
    from services.worker.layers.triton_rows import gate

    gate_up = random(3, 2 * size)
    gate_up *= 4  # beyond the limits of clamped_swiglu
    atol = 1e-5 if activation == "gelu" else 1e-6  # 1 + erf(x) loses digits where erf(x) is near -1
    torch.testing.assert_close(gate(gate_up, activation), PLAIN.gate(gate_up, activation), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [16, 48, 300])
def test_the_gate_with_quantisation(size, activation):
    from services.worker.layers.triton_rows import gate_quantized

    gate_up = random(5, 2 * size)
    expected = PLAIN.gate_quantized(gate_up, activation)
    for block in (None, gate_up.shape[1] // 2):  # the size itself is no smaller block
        near(gate_quantized(gate_up, activation, block), expected)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("size", [16, 48, 300])
def test_the_norm(size, adds):
    from services.worker.layers.triton_rows import norm

    x, weight = random(5, size), random(size, seed=1)
    delta = random(5, size, seed=2) if adds else None
    expected_x = x.clone()
    expected = PLAIN.norm(expected_x, weight, 1e-5, delta)
    torch.testing.assert_close(norm(x, delta, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x, expected_x)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("size", [16, 48])
def test_the_norm_with_quantisation(size, adds):
    from services.worker.layers.triton_rows import norm_quantized

    x, weight = random(5, size), random(size, seed=1)
    delta = random(5, size, seed=2) if adds else None
    expected_x = x.clone()
    expected = PLAIN.norm_quantized(expected_x, delta, weight, 1e-5)
    before = x.clone()
    near(norm_quantized(x, delta, weight, 1e-5), expected)
    near(norm_quantized(before, delta, weight, 1e-5, x.shape[1]), expected)
    torch.testing.assert_close(x, expected_x)


def test_rows_of_zeros_and_rows_with_what_is_no_number():
    from services.worker.layers.triton_rows import quantize

    x = random(4, 32)
    x[1], x[2, 5] = 0, torch.nan
    found = values(*quantize(x))
    near([part[[0, 1, 3]] for part in quantize(x)], [part[[0, 1, 3]] for part in quantize_rows(x)])
    assert (found[1] == 0).all()
    assert found[2].isnan().all()
