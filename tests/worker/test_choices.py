"""Values that a worker chooses for flags that are ``auto``, for given devices."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.model import SHAPES
from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import build
from services.worker.boot.common import device_facts
from services.worker.described.choices import (
    NAMES,
    Device,
    FlagChoice,
    agree,
    choose,
    refuse_impossible_quantization,
)
from services.worker.described.config import ModelConfig
from services.worker.described.memory import BFLOAT16, footprint, weight_bytes
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from tests.properties import examples
from tests.quick import quick_if

GIB = 2**30
CONTEXT = 131072


def described(shape: str) -> ModelConfig:
    shared = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": CONTEXT}
    return read_model_config(shared | {"rope_theta": 500000.0, "hidden_act": "silu"} | SHAPES[shape])


MODELS = {shape: described(shape) for shape in ("llama-1b", "llama-8b", "llama-70b", "qwen3-30b-a3b")}


def gpu(free: float, total: float = 140, processors: int = 132, capability: tuple[int, int] = (9, 0)) -> Device:
    return Device("cuda", "a GPU", int(free * GIB), int(total * GIB), processors, capability)


def cpu(free: float) -> Device:
    return Device("cpu", "CPU", int(free * GIB), int(free * GIB), 8)


def choices(device: Device, shape: str = "llama-1b", **flags: Any) -> tuple[ChosenWorkerConfig, dict[str, FlagChoice]]:
    model, config = MODELS[shape], build(WorkerConfig, flags)
    ranks = Ranks(0, config.tp_size, 0, config.pp_size)
    layers = range(len(model.layers) // config.pp_size)
    chosen, made = choose(config, device, model, ranks, layers)
    return chosen, {each.name: each for each in made}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("llama-1b", {"max_seqs_per_forward": 8192, "max_tokens_per_forward": 16384, "cudagraph_max_size": 1024}),
        ("llama-8b", {"max_seqs_per_forward": 4096, "max_tokens_per_forward": 8192, "cudagraph_max_size": 256}),
    ],
)
def test_an_h200_gets_the_sizes_that_were_tuned_by_hand(shape, expected):
    """The sizes are those of docs/performance/gpu.md."""
    for flags in ({}, {"quantization": "fp8"}):
        chosen, _ = choices(gpu(139), shape, **flags)
        found = {name: getattr(chosen, name) for name in expected}
        if shape == "llama-8b" and flags:  # half the weights leave a larger cache
            assert found.pop("max_seqs_per_forward") >= 4096
        assert found.items() <= expected.items()
        assert (chosen.use_cudagraphs, chosen.torch_compile, chosen.kv_cache_num_tokens) == (True, False, "auto")


def test_piecewise_cuda_graphs_serve_the_steps_that_the_host_would_launch_too_slowly():
    def tokens(shape: str = "llama-1b", **flags) -> int:
        return choices(gpu(139), shape, **flags)[0].piecewise_tokens

    assert tokens(use_cudagraphs=False) == 0
    assert tokens(max_tokens_per_forward=8192) == 2048
    assert tokens(max_tokens_per_forward=512) == 512
    assert tokens(max_tokens_per_forward=8192, tp_size=2) == 8192
    assert tokens(tp_size=2, piecewise_cudagraph_max_tokens=0) == 0
    assert tokens("qwen3-30b-a3b", max_seqs_per_forward=4096) == 4096
    assert tokens("qwen3-30b-a3b", max_seqs_per_forward=64) == 2048
    assert choices(cpu(20))[0].piecewise_tokens == 0


@pytest.mark.parametrize(
    ("tp_size", "shape"),
    quick_if(lambda tp_size, shape: tp_size == 2 or shape == "llama-8b", itertools.product([1, 2], MODELS)),
)
@settings(max_examples=examples(100, share=10))
@given(free=st.floats(1, 190), used=st.floats(0, 100), processors=st.integers(8, 160), older=st.booleans())
def test_on_any_gpu_steps_and_graphs_take_a_quarter_of_what_weights_leave(
    shape, tp_size, free, used, processors, older
):
    device = gpu(free, free + used, processors, (8, 0) if older else (9, 0))
    chosen, _ = choices(device, shape, tp_size=tp_size)
    assert 1 <= chosen.max_seqs_per_forward <= chosen.max_tokens_per_forward <= 16384
    assert 32 <= chosen.cudagraph_max_size <= 1024
    model, ranks = MODELS[shape], Ranks(0, tp_size)
    found = footprint(chosen, model, ranks, range(len(model.layers)))
    room = device.free - found.weights
    if chosen.max_tokens_per_forward > 512 and chosen.max_seqs_per_forward > 16:
        assert found.step + found.reserved <= room / 4 + 2.5 * GIB  # a step of one token takes about 2 GiB


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"max_seqs_per_forward": "20000"}, {"max_tokens_per_forward": 20000}),
        ({"max_tokens_per_forward": "100"}, {"max_seqs_per_forward": 100}),
        ({"kv_cache_num_tokens": "(64 * 1024)"}, {"max_seqs_per_forward": 256}),
        ({"fail_on_recompile": "T"}, {"torch_compile": True}),
        ({"async_tp_threshold": "20000", "tp_size": "2"}, {"max_tokens_per_forward": 20000}),
    ],
    ids=str,
)
def test_a_value_that_is_set_is_kept_and_the_others_adapt_to_it(flags, expected):
    chosen, made = choices(gpu(139), **flags)
    assert {name: getattr(chosen, name) for name in expected} == expected
    for name in flags.keys() & set(NAMES):
        assert made[name].reason == "set by you"
        assert getattr(chosen, name) == getattr(build(WorkerConfig, flags), name)


def test_a_gpu_that_others_use_gives_what_is_free_and_says_so():
    chosen, made = choices(gpu(30), "llama-8b")
    assert chosen.max_seqs_per_forward < 4096
    assert "30.0 GiB that are free" in made["kv_cache_num_tokens"].reason
    assert "other programs use 110.0 GiB" in made["kv_cache_num_tokens"].reason
    assert "other programs" not in choices(gpu(139.5), "llama-8b")[1]["kv_cache_num_tokens"].reason


@given(free=st.floats(0.5, 500))
def test_a_cache_on_a_cpu_takes_at_most_half_of_the_free_memory(free):
    chosen, made = choices(cpu(free))
    assert not chosen.use_cudagraphs
    assert not chosen.torch_compile
    assert chosen.kv_cache_num_tokens == "auto" or 16 <= chosen.kv_cache_num_tokens <= 128 * 1024
    page = footprint(chosen, MODELS["llama-1b"], Ranks(), range(16)).page
    if chosen.page_count is not None and chosen.page_count > 1:
        assert chosen.page_count * page <= free * GIB / 2
    assert made["max_seqs_per_forward"].value == "256"


def test_each_choice_has_a_value_and_a_reason():
    for device in (gpu(139), gpu(7.5, 8), cpu(20)):
        _, made = choices(device)
        assert list(made) == list(NAMES)
        assert all(each.value and each.reason for each in made.values())


def test_pipeline_stages_of_unequal_layers_agree_on_the_least_sizes():
    model = MODELS["llama-8b"]
    stages = [range(20), range(20, 32)]
    config = build(WorkerConfig, {"pp_size": "2"})
    made = [choose(config, gpu(60), model, Ranks(0, 1, index, 2), layers) for index, layers in enumerate(stages)]
    sizes = [[getattr(chosen, name) for name in NAMES if type(getattr(chosen, name)) is int] for chosen, _ in made]
    assert sizes[0] != sizes[1]
    values = [iter(each) for each in zip(*sizes, strict=True)]

    def least(value: int) -> int:
        both = list(values.pop(0))
        assert value in both
        return min(both)

    chosen, choices = agree(*made[1], least)
    assert chosen.max_seqs_per_forward <= chosen.max_tokens_per_forward
    assert [int(each.value) for each in choices if each.value.isdigit()] == [
        min(both) for both in zip(*sizes, strict=True)
    ]


def test_replicas_on_a_cpu_share_half_of_the_free_memory():
    alone, _ = choices(cpu(16))
    one_of_two, _ = choices(cpu(16), dp_size="2")
    assert 2 * one_of_two.kv_cache_num_tokens <= alone.kv_cache_num_tokens


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
ACT_ORDER = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}


def quantized(settings: dict[str, Any] | None, device: Device, **flags: Any) -> tuple[str, str]:
    """Return the value of ``quantization`` and the reason for a Llama 8B with these settings of its weights."""
    shared = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": CONTEXT}
    model = read_model_config(shared | SHAPES["llama-8b"] | {"quantization_config": settings})
    return chosen_quantization(model, device, **flags)


def chosen_quantization(model: ModelConfig, device: Device, **flags: Any) -> tuple[str, str]:
    """Return the value of ``quantization`` and the reason."""
    config = build(WorkerConfig, flags)
    ranks = Ranks(0, config.tp_size)
    refuse_impossible_quantization(config, device, model, ranks)
    chosen, made = choose(config, device, model, ranks, range(len(model.layers)))
    [found] = [each for each in made if each.name == "quantization"]
    assert chosen.quantization == found.value
    return found.value, found.reason


AMPERE = gpu(80, 80, capability=(8, 0))


@pytest.mark.parametrize(
    ("settings", "device", "flags", "value", "reason"),
    [
        (None, gpu(139), {}, "none", "the layers of the checkpoint are not quantized"),
        (None, cpu(20), {}, "none", "the layers of the checkpoint are not quantized"),
        (FP8, gpu(139), {}, "checkpoint", "weights stay FP8"),
        (BLOCKS, gpu(139), {}, "checkpoint", "weights stay FP8 in blocks of 128 x 128"),
        (BLOCKS, gpu(139), {"tp_size": "2"}, "checkpoint", "weights stay FP8 in blocks of 128 x 128"),
        (AWQ, gpu(139), {}, "checkpoint", "weights stay INT4 in groups of 128"),
        (AWQ, gpu(139), {"dtype": "float16"}, "checkpoint", "weights stay INT4 in groups of 128"),
        (AWQ, AMPERE, {}, "checkpoint", "weights stay INT4 in groups of 128"),
        (AWQ, cpu(20), {}, "none", "(INT4 in groups of 128) are converted to dtype on CPUs"),
        (AWQ, gpu(139), {"dtype": "float32"}, "none", "to dtype: with dtype=float32 there is no product for them"),
        (FP8, gpu(139), {"dtype": "float16"}, "none", "to dtype: with dtype=float16 there is no product for them"),
        (BLOCKS, AMPERE, {}, "none", "to dtype: a GPU has no products in fp8 with scales of rows"),
        (ACT_ORDER, gpu(139), {}, "checkpoint", "weights stay INT4 in groups of 128"),
        (ACT_ORDER, gpu(139), {"tp_size": "2"}, "none", "neighbours (act-order), so ranks cannot have shares of them"),
        (AWQ | {"group_size": 16}, gpu(139), {}, "none", "groups must have a multiple of 32 inputs of one output"),
    ],
)
def test_weights_stay_quantized_where_there_is_a_product_for_them(settings, device, flags, value, reason):
    found, why = quantized(settings, device, **flags)
    assert found == value
    assert why.endswith(reason)
    if value == "checkpoint":
        assert quantized(settings, device, quantization="checkpoint", **flags) == ("checkpoint", "set by you")
    else:
        with pytest.raises(
            InvalidRequest, match=r"^flag quantization=checkpoint: .*; use quantization=auto or none$"
        ) as caught:
            quantized(settings, device, quantization="checkpoint", **flags)
        assert caught.value.field == "quantization"
        assert reason in caught.value.message


@pytest.mark.parametrize(
    ("device", "flags", "value", "reason"),
    [
        (gpu(139), {}, "checkpoint", "weights stay MXFP4 in groups of 32"),
        (AMPERE, {"dtype": "float16", "tp_size": "2"}, "checkpoint", "weights stay MXFP4 in groups of 32"),
        (gpu(139), {"tp_size": "4"}, "none", "mlp.experts.0.down_proj.weight has 720 inputs, not a multiple of 32"),
        (gpu(139), {"tp_size": "4", "expert_parallel": "T"}, "checkpoint", "weights stay MXFP4 in groups of 32"),
        (gpu(139), {"dtype": "float32"}, "none", "with dtype=float32 there is no product for them"),
        (cpu(99), {}, "none", "(MXFP4 in groups of 32) are converted to dtype on CPUs"),
    ],
)
def test_the_experts_of_gpt_oss_stay_in_mxfp4(device, flags, value, reason):
    model = read_model_config(SHAPES["gpt-oss-20b"] | {"quantization_config": {"quant_method": "mxfp4"}})
    config = build(WorkerConfig, flags)
    ranks = Ranks(0, config.tp_size, whole_experts=config.expert_parallel)
    layers = range(len(model.layers))
    chosen, made = choose(config, device, model, ranks, layers)
    [found] = [each for each in made if each.name == "quantization"]
    assert chosen.quantization == found.value == value
    assert found.reason.endswith(reason)
    if value == "checkpoint":
        # 19.1 billion parameters of experts have 4.25 bits, and 1.8 billion others have 16.
        expected = (19.1e9 * 4.25 / 8 + 2 * 1.8e9) / ranks.tp_size
        assert weight_bytes(model, ranks, layers, BFLOAT16, value) == pytest.approx(expected, rel=0.05)


def test_layers_that_are_converted_are_counted_with_the_reason():
    skipped = AWQ | {"modules_to_not_convert": ["model.layers.3"]}
    value, reason = quantized(skipped, gpu(139))
    assert value == "checkpoint"
    assert reason == (
        "weights stay INT4 in groups of 128, except in 1 of 32 layers: the checkpoint does not quantize them"
    )


def test_weights_that_stay_quantized_leave_a_larger_cache():
    def sequences(quantization: str) -> int:
        shared = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": CONTEXT}
        model = read_model_config(shared | SHAPES["llama-8b"] | {"quantization_config": AWQ})
        config = build(WorkerConfig, {"quantization": quantization})
        return choose(config, gpu(24, 24), model, Ranks(), range(32))[0].max_seqs_per_forward

    assert sequences("auto") == sequences("checkpoint") > sequences("none")


def test_ranks_on_unequal_gpus_choose_for_the_smaller_and_the_older(monkeypatch):
    here = SimpleNamespace(name="GPU", multi_processor_count=170, major=12, minor=0)
    others = iter([20 << 30, 24 << 30, 128, 809])
    group = SimpleNamespace(least=lambda value: min(value, next(others)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 << 30, 32 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    assert device_facts(torch.device("cuda"), group) == Device("cuda", "GPU", 20 << 30, 24 << 30, 128, (8, 9))
