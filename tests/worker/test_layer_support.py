"""Fast implementations run only the layers whose features they declare."""

from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.worker.attention.base import LayerAttention
from services.worker.attention.factory import make_attention
from services.worker.attention.fast_cpu import FastCpuAttention
from services.worker.attention.plain import PlainAttention
from services.worker.boot.common import RunnerParts, boot
from services.worker.described.layer import LLAMA_LAYER, AttentionConfig, LayerConfig, MlpConfig, undeclared
from services.worker.layers.fast_cpu import FastCpuKernels
from services.worker.layers.linear import Linear
from services.worker.layers.panels import PanelLinear
from services.worker.models import decoder, fused_cpu
from services.worker.models.decoder import DecoderModel
from tests.worker.driver import Driver
from tests.worker.interpreter import needs_triton
from tests.worker.small_models import CPU, changed, one_sequence, small_config, small_model

NAMES = [field.name for part in (LayerConfig, AttentionConfig, MlpConfig) for field in fields(part)]
# The fields with a list of values: neither the parts of a layer nor numbers.
FIELDS = [name for name in NAMES if name not in ("attention", "mlp", "rope", "window", "scale", "soft_cap")]
# All features that the plain implementation has.
FEATURES = {"qk_norm": "per_head", "window": 8, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
NEW = "a feature of next year"


def model_for_cpus(**features) -> DecoderModel:
    return DecoderModel(small_config(**features), torch.float32, CPU, FastCpuKernels(), PanelLinear)


def model_for_few_rows(**features) -> DecoderModel:
    return small_model(small_config(**features), torch.float16, linear=partial(Linear, transposed=True))


def with_layer(model: DecoderModel, index: int, **changes) -> DecoderModel:
    """Return ``model`` as if layer ``index`` had ``changes``."""
    layers = list(model.local.layers)
    layers[index] = changed(layers[index], **changes)
    model.local = replace(model.local, layers=tuple(layers))
    return model


@dataclass(frozen=True)
class NewAttention(AttentionConfig):
    """Attention with a field that no implementation has declared."""

    feature: bool = False


@pytest.mark.parametrize("field", FIELDS)
def test_the_plain_layer_refuses_a_feature_that_it_does_not_have(field):
    with pytest.raises(ValueError, match=f"no implementation of {field}"):
        small_model(small_config(**{field: NEW}))


@pytest.mark.parametrize("field", FIELDS)
def test_the_decoder_for_cpus_is_not_used_for_a_layer_with_an_undeclared_feature(field):
    for features in ({}, FEATURES):
        model = model_for_cpus(**features)
        assert fused_cpu.supports(model)
        assert not fused_cpu.supports(with_layer(model, 1, **{field: NEW}))
        with pytest.raises(ValueError, match="use the model itself"):
            fused_cpu.FusedDecoder(model, one_sequence(model.config, 1)[0])


@pytest.mark.parametrize("changes", [{"rope": 1}, {"rope": None}, {"soft_cap": 30.0}, {"sinks": True}])
def test_the_decoder_for_cpus_has_one_rotation_and_plain_scores(changes):
    model = model_for_cpus(scale=0.3)
    assert fused_cpu.supports(model)
    for index in range(len(model.layers)):
        with_layer(model, index, **changes)
    assert not fused_cpu.supports(model)


@pytest.mark.parametrize("changes", [{"qkv_bias": True}, {"qk_norm": "per_head"}, {"mlp_bias": True}])
def test_the_decoder_for_cpus_needs_layers_that_differ_in_their_windows_only(changes):
    model = model_for_cpus()
    assert fused_cpu.supports(with_layer(model, 0, window=8))
    assert not fused_cpu.supports(with_layer(model, 0, **changes))


@needs_triton
@pytest.mark.parametrize("field", FIELDS)
def test_the_decoder_for_few_rows_is_not_used_for_a_layer_with_an_undeclared_feature(field):
    from services.worker.models import skinny_cuda

    for features in ({}, FEATURES):
        model = model_for_few_rows(**features)
        assert skinny_cuda.supports(model)
        assert not skinny_cuda.supports(with_layer(model, 1, **{field: NEW}))
        with pytest.raises(ValueError, match="use the model itself"):
            skinny_cuda.SkinnyDecoder(model)


def test_a_field_without_an_entry_must_have_its_default():
    """Otherwise an implementation would run a feature that was added after it."""
    assert undeclared(LLAMA_LAYER, {}) == []
    layer = changed(LLAMA_LAYER, **FEATURES)
    missing = ["qkv_bias", "output_bias", "qk_norm", "mlp_bias"]
    assert undeclared(layer, {"window": (8,), "mlp_bias": (False,)}) == missing
    assert undeclared(NewAttention(), {}) == []
    assert undeclared(NewAttention(feature=True), decoder.SUPPORTED) == ["feature"]


def test_another_kind_of_attention_is_another_feature():
    """Its fields may all have their defaults, and it may still be computed otherwise."""
    assert undeclared(LayerConfig(attention=NewAttention()), decoder.SUPPORTED) == ["attention"]


def test_no_two_fields_have_the_same_name():
    """Implementations declare fields by name."""
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("field", [field.name for field in fields(LayerAttention)])
def test_attention_on_cpus_is_the_plain_one_for_an_undeclared_feature(field):
    cache, _ = one_sequence(small_config(), 1)
    known = LayerAttention(0.25)
    new = replace(known, **{field: torch.zeros(4) if field == "sinks" else 8})
    assert isinstance(make_attention(cache, 4, [known, known, known]), FastCpuAttention)
    expected = FastCpuAttention if field in ("scale", "window", "rope") else PlainAttention
    assert isinstance(make_attention(cache, 4, [known, new, known]), expected)


@needs_triton
def test_a_gpu_refuses_attention_with_an_undeclared_feature():
    from services.worker.boot.cuda import make_runner

    model = with_layer(model_for_few_rows(), 1, sinks=NEW)
    with pytest.raises(InvalidRequest, match="sinks of the model's attention is not supported on cuda"):
        make_runner(RunnerParts(ChosenWorkerConfig(), model))


@pytest.mark.parametrize("feature", ["qk_norm", "window", "none"])
def test_a_worker_gives_the_same_tokens_with_the_plain_layer(feature, checkpoint, monkeypatch):
    """A decoder that does not declare a feature of the model is never called, and the tokens stay the same."""
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    flags = {"model": str(checkpoint("qwen3", **window)), "device": "cpu", "kv_cache_num_tokens": 1024}
    prompts = [list(range(3, 40)), [7, 8]]
    calls, call = [], fused_cpu.FusedDecoder.__call__
    monkeypatch.setattr(
        fused_cpu.FusedDecoder, "__call__", lambda *arguments: calls.append(arguments) or call(*arguments)
    )
    expected = Driver(boot(WorkerConfig(**flags)).runner).generate(prompts, 12)
    assert calls
    calls.clear()
    known = {name: values for name, values in fused_cpu.SUPPORTED.items() if name != feature}
    monkeypatch.setattr(fused_cpu, "SUPPORTED", known)
    assert Driver(boot(WorkerConfig(**flags)).runner).generate(prompts, 12) == expected
    assert bool(calls) is (feature == "none")
