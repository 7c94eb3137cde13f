"""A forward pass can be captured as a CUDA graph: it makes no tensor from values of the host."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.model.json_object import read_json
from services.worker.attention.base import RotatingAttentionStep
from services.worker.described.registry import read_model_config
from services.worker.layers.kernels import TorchKernels
from services.worker.models.decoder import DecoderModel
from services.worker.models.weights import load_dummy
from tests.checkpoints import ARCHITECTURES
from tests.worker.small_models import CPU


class NoAttention(RotatingAttentionStep):
    """Attention that returns zeros, for ``size`` elements of all query heads."""

    def __init__(self, size: int) -> None:
        self._size = size

    def run_qkv(self, layer_index, qkv, norms):
        return qkv.new_zeros(len(qkv), self._size)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_forward_pass_copies_nothing_from_the_host(architecture, checkpoint):
    config = read_model_config(read_json(checkpoint(architecture) / "config.json"))
    model = DecoderModel(config, torch.bfloat16, CPU, TorchKernels())
    load_dummy(model, seed=0)
    step, token_ids = NoAttention(config.heads * config.head_dim), torch.arange(3)
    with torch.inference_mode(), Operators() as operators:
        model.logits(model(token_ids, token_ids, step))
    assert "aten.embedding.default" in operators.names
    assert "aten.lift_fresh.default" not in operators.names  # torch.tensor, new_tensor and from_numpy
