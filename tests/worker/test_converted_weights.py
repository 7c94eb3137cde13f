"""Weights of quantized checkpoints that are converted, since they cannot stay quantized, and the reasons."""

import pytest

from services.common.model.json_object import read_json
from services.worker.described.config import ModelConfig
from services.worker.described.forms import IN_DTYPE, WeightForm, layer_forms
from services.worker.described.heads import laid_out
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from tests.quantized_files import compressed
from tests.worker.test_kept_weights import BLOCKS, MOE, MXFP4, SIZES
from tests.worker.test_quantized_checkpoints import FLOAT, FP8, INT4, gptq

FALLBACKS = {
    "experts in act-order": (
        gptq(32, desc_act=True),
        "qwen3_moe",
        MOE,
        "inputs of experts that share a scale are not neighbours (act-order)",
    ),
    "mxfp4 without experts": (MXFP4, "llama", {}, "not all experts of the layer are in MXFP4"),
    "experts that are ignored": (
        MXFP4 | {"modules_to_not_convert": ["experts"]},
        "gpt_oss",
        {},
        "not all experts of the layer are in MXFP4",
    ),
    "experts of other sizes": (
        MXFP4,
        "gpt_oss",
        {"intermediate_size": 80},
        "mlp.experts.0.down_proj.weight has 80 inputs, not a multiple of 32",
    ),
    "groups of 16": (gptq(16), "llama", {}, "groups must have a multiple of 32 inputs of one output"),
    "blocks of 64": (FP8 | {"weight_block_size": [64, 64]}, "llama", {}, "or for blocks of 128 x 128"),
    "fused": (FP8, "phi3", {}, "the checkpoint has several matrices in one tensor"),
    "multiplied": (FP8, "granite", {}, "the values of this architecture are changed when they are read"),
    "inputs": (
        gptq(128),
        "llama",
        {"intermediate_size": 192},
        "down_proj.weight has 192 inputs, not a multiple of 128",
    ),
    "outputs": (BLOCKS, "llama", {"num_key_value_heads": 1}, "k_proj.weight has 64 outputs, not a multiple of 128"),
    "ignored in a layer": (
        compressed("pack-quantized", INT4, ignore=["lm_head", "re:.*down_proj"]),
        "llama",
        {},
        "not all matrices of a layer are quantized alike",
    ),
}


def described(checkpoint, settings: dict, architecture: str = "llama", **sizes) -> ModelConfig:
    """Return the description of a checkpoint with ``settings``. Its weights are not read."""
    raw = read_json(checkpoint(architecture, **SIZES | sizes) / "config.json")
    return read_model_config(raw | {"quantization_config": settings})


def reasons(config: ModelConfig, ranks: Ranks | None = None) -> set[tuple[WeightForm, str]]:
    forms = layer_forms(config, ranks or Ranks(), range(len(config.layers)))
    assert all(each.scheme is not None for each in forms)
    return {(each.form, each.reason) for each in forms}


@pytest.mark.parametrize("name", FALLBACKS)
def test_weights_without_a_product_are_converted_with_the_reason(name, checkpoint):
    settings, architecture, sizes, expected = FALLBACKS[name]
    [(form, reason)] = reasons(described(checkpoint, settings, architecture, **sizes))
    assert form == IN_DTYPE
    assert reason.endswith(expected)


def test_shares_that_cut_groups_are_converted(checkpoint):
    config = described(checkpoint, gptq(128), intermediate_size=384)
    assert reasons(config) == {(WeightForm("grouped", 4, 128), "")}
    [(form, reason)] = reasons(config, Ranks(0, 2))
    assert form == IN_DTYPE
    assert reason == "a share of mlp.down_proj.weight has 192 inputs, not a multiple of 128"


def test_shares_of_experts_that_cut_groups_are_converted_and_whole_experts_are_not(checkpoint):
    config = described(checkpoint, gptq(128), "qwen3_moe", **MOE | {"moe_intermediate_size": 384})
    [(form, reason)] = reasons(config, Ranks(0, 2))
    assert form == IN_DTYPE
    assert reason == "a share of mlp.experts.0.down_proj.weight has 192 inputs, not a multiple of 128"
    assert reasons(config, Ranks(0, 2, whole_experts=True)) == {(WeightForm("grouped", 4, 128), "")}


def test_heads_that_are_padded_are_converted(checkpoint):
    config = described(checkpoint, FP8, head_dim=48)
    assert reasons(config) == {(WeightForm("fp8"), "")}
    [(form, reason)] = reasons(laid_out(config, "cuda"))
    assert (form, reason) == (IN_DTYPE, "the values of this architecture are changed when they are read")


def test_a_layer_with_two_schemes_is_converted(checkpoint):
    settings = compressed("mixed-precision", INT4)
    settings["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": FLOAT, "format": "float-quantized"},
    }
    [(form, reason)] = reasons(described(checkpoint, settings))
    assert (form, reason) == (IN_DTYPE, "not all matrices of a layer are quantized alike")
