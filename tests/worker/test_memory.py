"""The estimate of a rank's memory is the memory that its model takes."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.config import ChosenWorkerConfig
from services.common.model.files import BUILTIN
from services.common.model.json_object import read_json
from services.worker.described.checkpoint import checkpoint_shapes
from services.worker.described.config import ModelConfig
from services.worker.described.layer import LLAMA_LAYER
from services.worker.described.memory import (
    BFLOAT16,
    footprint,
    kept_in_piece,
    piece_sizes,
    rotation_bytes,
    weight_bytes,
)
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from services.worker.described.rope import RopeSettings
from services.worker.described.shares import local_config
from services.worker.described.stages import layers_of
from services.worker.layers.factory import make_kernels, make_linear
from services.worker.models.decoder import DecoderModel
from services.worker.models.experts import Experts
from tests.worker.small_models import CPU, changed
from tests.worker.test_integers import MIXTURES

PLAIN = ModelConfig(
    vocab_size=336, hidden_size=128, intermediate_size=192, layers=(LLAMA_LAYER,) * 3, heads=8, kv_heads=2,
    head_dim=32, norm_eps=1e-6, max_context_tokens=64, ropes=(RopeSettings("default", 1e4),), tied_embeddings=False,
)  # fmt: skip
QWEN3 = changed(LLAMA_LAYER, qk_norm="per_head")
BIASES = changed(LLAMA_LAYER, qkv_bias=True, output_bias=True, mlp_bias=True)
MODELS = {
    "llama": PLAIN,
    "tied": replace(PLAIN, tied_embeddings=True),
    "qwen3": replace(PLAIN, tied_embeddings=True, layers=(QWEN3,) * 3, vocab_size=350),
    "biases": replace(PLAIN, layers=(BIASES,) * 3),
}
GRIDS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 3))


def made(model: ModelConfig, ranks: Ranks, layers: range, quantization: str) -> DecoderModel:
    local = local_config(model, ranks, layers)
    linear = make_linear(local, torch.bfloat16, CPU, quantization, ranks.tp_size)
    return DecoderModel(
        model, torch.bfloat16, CPU, make_kernels(CPU, torch.bfloat16), linear, ranks=ranks, layers=layers
    )


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_take_what_is_said(name, quantization):
    model = MODELS[name]
    if quantization != "none":  # sizes of a rank that are multiples of 16 or 32
        model = replace(model, vocab_size=352, intermediate_size=256)
    for tp_size, pp_size in GRIDS:
        stages = layers_of(model, pp_size)
        for tp_rank, pp_rank in itertools.product(range(tp_size), range(pp_size)):
            ranks, layers = Ranks(tp_rank, tp_size, pp_rank, pp_size), stages[pp_rank]
            decoder = made(model, ranks, layers, quantization)
            taken = sum(each.nbytes for each in itertools.chain(decoder.parameters(), decoder.buffers()))
            assert weight_bytes(model, ranks, layers, BFLOAT16, quantization, "cpu") == taken, (ranks, layers)
            rotary = decoder.rotaries[0]
            assert rotation_bytes(model) == rotary.cos.nbytes + rotary.sin.nbytes


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_weights_of_mixtures_take_what_is_said(architecture, quantization, checkpoint):
    model = read_model_config(read_json(checkpoint(architecture, **MIXTURES[architecture]) / "config.json"))
    for ranks in (Ranks(), Ranks(0, 2), Ranks(1, 2, whole_experts=True)):
        decoder = made(model, ranks, range(len(model.layers)), quantization)
        counts = [layer.mlp.load.nbytes for layer in decoder.layers if isinstance(layer.mlp, Experts)]
        taken = sum(each.nbytes for each in itertools.chain(decoder.parameters(), decoder.buffers())) - sum(counts)
        found = weight_bytes(model, ranks, range(len(model.layers)), BFLOAT16, quantization, "cpu")
        assert found == pytest.approx(taken, rel=0.001), ranks  # corrections of routers count as bfloat16


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_has_the_tensors_that_are_loaded(name):
    targets = made(MODELS[name], Ranks(), range(3), "none").targets()
    assert checkpoint_shapes(MODELS[name]) == {key: tuple(target.shape) for key, target in targets.items()}


def test_less_fits_beside_a_larger_step_and_more_with_fp8():
    model = read_model_config(read_json(BUILTIN / "config.json"))
    free = total = 8 << 30

    def fitting(**flags) -> int:
        found = footprint(ChosenWorkerConfig(**flags), model, Ranks(), range(len(model.layers)))
        return found.pages_in(free, total)

    assert 0 < fitting(max_tokens_per_forward=65536) < fitting()
    assert fitting(use_cudagraphs=True) < fitting() < fitting(kv_cache_dtype="fp8")
    assert footprint(ChosenWorkerConfig(), model, Ranks(), range(len(model.layers))).pages_in(1 << 29, 1 << 29) < 1


@given(largest=st.integers(1, 20_000))
def test_a_step_in_pieces_is_padded_by_an_eighth_or_by_few_tokens(largest):
    sizes = piece_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for below, size in itertools.pairwise([0, *sizes]):
        assert size - below - 1 <= max(63, below / 8)
        assert kept_in_piece(size) in (size, size // 8)
