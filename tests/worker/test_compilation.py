"""The compiler makes one graph for all layers and every number of tokens."""

import copy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from services.worker.attention.base import RotatingAttentionStep
from services.worker.attention.compiled import FIRST_LAYER
from services.worker.boot import compilation
from services.worker.described.ranks import Ranks
from services.worker.models.decoder import DecoderModel
from tests.worker.small_models import small_config, small_model


@torch.library.custom_op("tokasaurus_test::attention", mutates_args=())
def _attention(
    qkv: torch.Tensor, layer: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return torch.sin(qkv[:, :64] + layer - FIRST_LAYER)


@_attention.register_fake
def _(qkv, layer, q_norm, k_norm, eps):
    return qkv.new_empty(qkv.shape[0], 64)


class OpaqueStep(RotatingAttentionStep):
    """An attention step without state for compiled code to depend on."""

    def run_qkv(self, layer_index, qkv, norms):
        if not torch.compiler.is_compiling():
            layer_index += FIRST_LAYER
        return torch.ops.tokasaurus_test.attention(qkv, layer_index, *(norms or (None, None, 0.0)))


class Pair:
    """A compiled model, and the same model without compilation."""

    def __init__(self, model: DecoderModel) -> None:
        self._model, self._eager = model, model.run_layer
        compilation.compile_model(model)
        self._compiled = model.run_layer

    @torch.inference_mode()
    def check(self, tokens: int, samples: int | None = None) -> None:
        """Check that both agree for a step of ``tokens`` tokens, of which ``samples`` are sampled from."""
        token_ids, positions = torch.arange(tokens) * 7 % 320, torch.arange(tokens)
        keep = None if samples is None else torch.arange(samples) * (tokens // samples)
        self._model.run_layer = self._compiled
        compiled = self._model(token_ids, positions, OpaqueStep(), keep)
        self._model.run_layer = self._eager
        exact = self._model(token_ids, positions, OpaqueStep(), keep)
        assert compiled.shape == exact.shape
        assert (compiled - exact).norm() / exact.norm() < 0.03


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize(
    ("quantization", "adds_in_product", "graphs"), [("none", False, 3), ("none", True, 2), ("fp8", False, 3)], ids=str
)
def test_few_graphs_serve_all_layers_and_every_number_of_tokens(quantization, adds_in_product, graphs):
    """There is a graph for layers that keep all tokens, and one for a last layer that selects tokens. If later layers
    have a delta to add, the first layer has a graph too."""
    config = small_config(layers=5, qk_norm="per_head")
    dtype = torch.float32
    model = small_model(config, dtype, quantization=quantization, adds_in_product=adds_in_product)
    pair, before = Pair(model), compilation.compilations()
    pair.check(16)
    pair.check(16, 16)  # as many samples as tokens: by chance
    assert compilation.compilations() - before == graphs
    compilation.mark_ready()
    with compilation.forbid_recompilation():
        for tokens in (8, 24, 200):
            pair.check(tokens)
            for samples in (8, tokens // 2, tokens):
                pair.check(tokens, samples)
    assert compilation.recompilations() == 0


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adds_in_product", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@torch.inference_mode()
def test_a_pipeline_stage_is_one_graph_wherever_its_inputs_are(stage, adds_in_product, monkeypatch):
    """In tensors of their own and in a graph's room, both of which are written over; with as many tokens as a row of
    them is wide, by chance."""
    config = small_config(layers=3)
    ranks, layers = Ranks(pp_rank=stage, pp_size=3), range(stage, stage + 1)
    model = small_model(config, ranks=ranks, layers=layers, adds_in_product=adds_in_product)
    eager = copy.copy(model)
    # The same graphs, without the time that a C++ compiler takes for them.
    make = partial(torch.compile, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, **options: make(function))
    compilation.compile_model(model)
    before, room = compilation.compilations(), torch.zeros(96, config.hidden_size)
    for tokens in (config.hidden_size, 8, 96, 24):
        entering, positions = torch.randn(tokens, config.hidden_size), torch.arange(tokens)
        expected = eager(entering.clone(), positions, OpaqueStep(), None)
        in_room = room[:tokens].copy_(entering)
        for inputs in (entering.clone(), in_room):
            torch.testing.assert_close(model(inputs, positions, OpaqueStep(), None), expected, atol=1e-5, rtol=0)
    assert compilation.compilations() - before == 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore")
def test_a_recompilation_is_counted_or_forbidden():
    pair = Pair(small_model(small_config(layers=1)))
    pair.check(16)
    compilation.mark_ready()
    with compilation.forbid_recompilation(), pytest.raises(RuntimeError, match="recompile"):
        pair.check(1)  # a size of its own
    assert compilation.recompilations() == 0
    pair.check(1)
    assert compilation.recompilations() == 1


def test_kernels_that_are_compiled_after_the_boot_are_counted(monkeypatch):
    runtime = SimpleNamespace(jit_post_compile_hook=None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    compilation.mark_ready()
    assert compilation.kernel_compilations() == 0
    # As Triton calls it.
    runtime.jit_post_compile_hook(key="", repr="", fn=None, compile={}, is_manual_warmup=False, already_compiled=False)
    assert compilation.kernel_compilations() == 1
    compilation.mark_ready()
    assert compilation.kernel_compilations() == 0
