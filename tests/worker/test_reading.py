"""Tensors read by name from the memory of ranks are those of the checkpoint."""

import difflib
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.common.errors import InvalidRequest, NotFound
from services.common.model.json_object import read_json
from services.worker.described import heads
from services.worker.described.checkpoint import EMBEDDING, HEAD
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from services.worker.described.shares import local_config
from services.worker.described.stages import layers_of
from services.worker.layers.factory import make_kernels, make_linear
from services.worker.models import reading, weights
from services.worker.models.decoder import DecoderModel
from tests.checkpoints import ARCHITECTURES
from tests.quick import quick_if
from tests.worker.small_models import small_config

CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def loaded(directory, *, tp_size=1, pp_size=1, laid_out_for="cpu", quantization="none", dtype=torch.float32) -> tuple:
    """Return the description of a checkpoint, and the model of each rank."""
    described = read_model_config(read_json(directory / "config.json"))
    config = heads.laid_out(described, laid_out_for)
    models = []
    for stage in range(pp_size):
        for rank in range(tp_size):
            ranks = Ranks(rank, tp_size, stage, pp_size)
            layers = layers_of(config, pp_size)[stage]
            linear = make_linear(local_config(config, ranks, layers), dtype, CPU, quantization, tp_size)
            model = DecoderModel(config, dtype, CPU, make_kernels(CPU, dtype), linear, ranks=ranks, layers=layers)
            weights.load(directory, model.targets(), described)
            models.append(model)
    return described, models


def read(described, models, name: str, rows: int) -> np.ndarray:
    """Return the values of all ranks together."""
    found = [reading.read_rows(model, described, name, rows) for model in models]
    whole = np.full(found[0].shape, np.nan, np.float32)
    for each in found:
        if each.values is not None:
            whole = np.where(np.isnan(whole), each.values.numpy(), whole)
    return whole


@pytest.mark.parametrize(
    "sizes", [{}, {"tp_size": 2, "pp_size": 2}, {"laid_out_for": "cuda"}], ids=["alone", "ranks", "cuda"]
)
@pytest.mark.parametrize(
    "architecture",
    quick_if(lambda architecture: architecture in {"gpt_oss", "llama", "phi3", "qwen2", "smollm3"}, ARCHITECTURES),
)
def test_tensors_are_those_of_the_checkpoint(checkpoint, architecture, sizes):
    directory = checkpoint(architecture)
    described, models = loaded(directory, **sizes)
    tensors = load_file(directory / "model.safetensors")
    assert tensors
    for name, tensor in tensors.items():
        for rows in (1, 5, 10**6):
            if tensor[:rows].numel():
                found = read(described, models, name, rows)
                np.testing.assert_allclose(found, tensor[:rows].float().numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_heads_with_padding_are_those_of_the_checkpoint(checkpoint):
    directory = checkpoint("llama", head_dim=48)
    described, models = loaded(directory, laid_out_for="cuda")
    for name, tensor in load_file(directory / "model.safetensors").items():
        np.testing.assert_array_equal(read(described, models, name, 7), tensor[:7].numpy(), err_msg=name)


def test_values_in_fp8_are_multiplied_by_their_scales(checkpoint):
    directory = checkpoint("llama")
    described, models = loaded(directory, quantization="fp8")
    exact = load_file(directory / "model.safetensors")[Q_PROJ][:9].numpy()
    found = read(described, models, Q_PROJ, 9)
    assert np.any(found != exact)
    np.testing.assert_allclose(found, exact, atol=float(np.abs(exact).max()) / 16)


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2, "pp_size": 2}], ids=["alone", "ranks"])
@pytest.mark.parametrize(("quantization", "steps"), [("int8", 254), ("int4", 15)])
def test_integers_are_multiplied_by_their_scales(checkpoint, quantization, steps, sizes):
    directory = checkpoint("llama", hidden_size=64, intermediate_size=192, vocab_size=200)
    described, models = loaded(directory, quantization=quantization, **sizes)
    for name, tensor in load_file(directory / "model.safetensors").items():
        for rows in (1, 70, 10**6):
            exact, found = tensor[:rows].numpy(), read(described, models, name, rows)
            assert found.shape == exact.shape
            assert np.any(found != exact) == (name.endswith(("_proj.weight", "lm_head.weight")))
            step = float(np.abs(exact).max()) * 2 / steps
            np.testing.assert_allclose(found, exact, atol=step, err_msg=name)


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2, "pp_size": 2}], ids=["alone", "ranks"])
def test_a_tied_head_has_the_values_of_the_embedding(checkpoint, sizes):
    described, models = loaded(checkpoint("llama", tied=True), **sizes)
    np.testing.assert_array_equal(read(described, models, HEAD, 50), read(described, models, EMBEDDING, 50))


def test_values_are_rounded_to_the_dtype_of_the_model(checkpoint):
    directory = checkpoint("llama")
    described, models = loaded(directory, dtype=torch.bfloat16)
    exact = load_file(directory / "model.safetensors")[Q_PROJ][:3]
    np.testing.assert_array_equal(read(described, models, Q_PROJ, 3), exact.bfloat16().float().numpy())


def test_an_unknown_name_is_refused_with_a_similar_one(checkpoint):
    described, [model] = loaded(checkpoint("llama"))
    with pytest.raises(NotFound, match=f"did you mean '{Q_PROJ}'"):
        reading.read_rows(model, described, Q_PROJ.replace("q_proj", "q_prj"), 1)


def test_names_that_differ_in_numbers_are_compared_once(monkeypatch):
    compared = []
    ratio = difflib.SequenceMatcher.ratio
    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", lambda self: compared.append(self.a) or ratio(self))
    with pytest.raises(NotFound, match=f"did you mean '{Q_PROJ}'"):
        reading.read_rows(None, small_config(layers=300), "model.layers.7.self_attn.q_prj.weight", 1)
    assert len(compared) < 50


def test_rows_with_too_many_values_are_refused_with_the_number_that_is_allowed():
    config = small_config(vocab_size=100_000)
    with pytest.raises(InvalidRequest, match="read at most") as refused:
        reading.read_rows(None, config, EMBEDDING, 100_000)
    assert refused.value.field == "rows"
    assert math.prod((100_000, config.hidden_size)) > 4_000_000
