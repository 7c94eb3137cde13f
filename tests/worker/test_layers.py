"""The compiled operators give what torch gives, and activations what transformers gives."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from services.common.model.json_object import JsonObject
from services.worker.described.config import read_activation
from services.worker.layers.activations import activate
from services.worker.layers.factory import make_kernels
from services.worker.layers.fast_cpu import FastCpuKernels
from services.worker.layers.kernels import TorchKernels

FAST, PLAIN = FastCpuKernels(), TorchKernels()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_norms_agree(tokens):
    x, delta, weight = random(tokens, 96), random(tokens, 96, seed=1), random(96, seed=2)
    torch.testing.assert_close(FAST.norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5))
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(FAST.norm(mine, weight, 1e-5, delta), PLAIN.norm(theirs, weight, 1e-5, delta))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_norms_over_heads_agree(tokens, count):
    heads = random(tokens, 6, 32)[:, 1 : 1 + count]
    torch.testing.assert_close(FAST.norm(heads, random(32), 1e-6), PLAIN.norm(heads, random(32), 1e-6))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_gates_agree(scale):
    gate_up = random(5, 2 * 70) * scale
    torch.testing.assert_close(FAST.gate(gate_up), PLAIN.gate(gate_up), rtol=1e-5, atol=1e-6 * scale)


def test_gates_are_exact_to_the_last_bits():
    gates = torch.linspace(-20, 20, 4001)
    found = FAST.gate(torch.cat((gates, torch.ones_like(gates)))[None])[0]
    torch.testing.assert_close(found.double(), F.silu(gates.double()), rtol=1.5e-6, atol=0)


def test_rotations_agree():
    x, cos, sin = random(5, 8, 16)[:, :3], random(5, 1, 16, seed=1), random(5, 1, 16, seed=2)
    torch.testing.assert_close(FAST.rotate(x, cos, sin), PLAIN.rotate(x, cos, sin))


def test_what_is_not_a_number_stays_so():
    x = random(3, 32)
    x[1, 5] = float("nan")
    for output in (FAST.norm(x, random(32), 1e-6), FAST.gate(x), FAST.rotate(x.view(3, 2, 16), *random(2, 3, 1, 16))):
        assert output.flatten(1).isnan().any(dim=1).tolist() == [False, True, False]


def test_each_device_and_dtype_gets_its_kernels():
    cpu = torch.device("cpu")
    assert isinstance(make_kernels(cpu, torch.float32), FastCpuKernels)
    assert isinstance(make_kernels(cpu, torch.bfloat16), TorchKernels)
    assert isinstance(make_kernels(cpu, torch.float32, compiled=True), TorchKernels)


@pytest.mark.parametrize(
    "name",
    ["silu", "swish", "gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate",
     "gelu_python_tanh", "relu", "relu2"],
)  # fmt: skip
def test_activations_are_those_that_transformers_has_under_their_names(name):
    x = torch.linspace(-12, 12, 1000)
    found = activate(x, read_activation(JsonObject("config.json", {"hidden_act": name}), "hidden_act", "silu"))
    torch.testing.assert_close(found, transformers.activations.ACT2FN[name](x), atol=1e-5, rtol=1e-6)
