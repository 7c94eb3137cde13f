"""Weights of quantized checkpoints that are converted, since they cannot stay quantized, and the reasons."""

import pytest

from services.common.model.json_object import read_json
from services.worker.described.config import ModelConfig
from services.worker.described.forms import IN_DTYPE, MATRICES, WeightForm, layer_forms
from services.worker.described.heads import laid_out
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from tests.quantized_files import compressed
from tests.worker.test_kept_weights import BLOCKS, MOE, MXFP4, SIZES
from tests.worker.test_quantized_checkpoints import FLOAT, FP8, INT4, gptq

# Settings, architecture, sizes, the matrices that stay quantized, and the reason for the others.
FALLBACKS = {
    "experts in act-order": (
        gptq(32, desc_act=True),
        "qwen3_moe",
        MOE,
        {"qkv", "output"},
        "inputs of experts that share a scale are not neighbours (act-order)",
    ),
    "mxfp4 without experts": (MXFP4, "llama", {}, set(), "only experts have products in MXFP4"),
    "experts that are ignored": (
        MXFP4 | {"modules_to_not_convert": ["experts"]},
        "gpt_oss",
        {},
        set(),
        "only experts have products in MXFP4",
    ),
    "experts of other sizes": (
        MXFP4,
        "gpt_oss",
        {"intermediate_size": 80},
        set(),
        "mlp.experts.0.down_proj.weight has 80 inputs, not a multiple of 32",
    ),
    "groups of 16": (gptq(16), "llama", {}, set(), "groups must have a multiple of 32 inputs of one output"),
    "blocks of 64": (FP8 | {"weight_block_size": [64, 64]}, "llama", {}, set(), "or for blocks of 128 x 128"),
    "fused": (FP8, "phi3", {}, {"output", "down"}, "the checkpoint has several matrices in one tensor"),
    "multiplied": (FP8, "granite", {}, set(), "the values of this architecture are changed when they are read"),
    "inputs": (
        gptq(128),
        "llama",
        {"intermediate_size": 192},
        {"qkv", "output", "inner"},
        "down_proj.weight has 192 inputs, not a multiple of 128",
    ),
    "outputs": (
        BLOCKS,
        "llama",
        {"num_key_value_heads": 1},
        {"output", "inner", "down"},
        "k_proj.weight has 64 outputs, not a multiple of 128",
    ),
    "a part that is ignored": (
        compressed("pack-quantized", INT4, ignore=["lm_head", "re:.*up_proj"]),
        "llama",
        {},
        {"qkv", "output", "down"},
        "not all parts of a matrix are quantized alike",
    ),
}


def described(checkpoint, settings: dict, architecture: str = "llama", **sizes) -> ModelConfig:
    """Return the description of a checkpoint with ``settings``. Its weights are not read."""
    raw = read_json(checkpoint(architecture, **SIZES | sizes) / "config.json")
    return read_model_config(raw | {"quantization_config": settings})


def kept_in(config: ModelConfig, ranks: Ranks | None = None) -> tuple[dict[str, WeightForm], str]:
    """Return the forms of the matrices that stay quantized, equal in all layers, and the reason for others."""
    [form] = set(layer_forms(config, ranks or Ranks(), range(len(config.layers))))
    assert form.schemes or form.converted
    matrices = zip(MATRICES, form.forms, strict=True)
    return {matrix: each for matrix, each in matrices if each != IN_DTYPE}, form.reason


@pytest.mark.parametrize("name", FALLBACKS)
def test_weights_without_a_product_are_converted_with_the_reason(name, checkpoint):
    settings, architecture, sizes, kept, expected = FALLBACKS[name]
    found, reason = kept_in(described(checkpoint, settings, architecture, **sizes))
    assert set(found) == kept
    assert reason.endswith(expected)


def test_shares_that_cut_groups_are_converted(checkpoint):
    config = described(checkpoint, gptq(128), intermediate_size=384)
    whole, reason = kept_in(config)
    assert (set(whole), reason) == ({"qkv", "output", "inner", "down"}, "")
    shared, reason = kept_in(config, Ranks(0, 2))
    assert whole == shared | {"down": WeightForm("grouped", 4, 128)}
    assert reason == "a share of mlp.down_proj.weight has 192 inputs, not a multiple of 128"


def test_shares_of_experts_that_cut_groups_are_converted_and_whole_experts_are_not(checkpoint):
    config = described(checkpoint, gptq(128), "qwen3_moe", **MOE | {"moe_intermediate_size": 384})
    shared, reason = kept_in(config, Ranks(0, 2))
    assert set(shared) == {"qkv", "output"}
    assert reason == "a share of mlp.experts.0.down_proj.weight has 192 inputs, not a multiple of 128"
    whole, reason = kept_in(config, Ranks(0, 2, whole_experts=True))
    assert (whole, reason) == (shared | {"experts": WeightForm("grouped", 4, 128)}, "")


def test_heads_that_are_padded_are_converted(checkpoint):
    config = described(checkpoint, FP8, head_dim=48)
    assert set(kept_in(config)[0].values()) == {WeightForm("fp8")}
    assert kept_in(laid_out(config, "cuda")) == ({}, "the values of this architecture are changed when they are read")


def test_matrices_of_a_layer_keep_different_schemes(checkpoint):
    settings = compressed("mixed-precision", INT4, ignore=["lm_head", "re:.*o_proj"])
    settings["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": FLOAT, "format": "float-quantized"},
    }
    integers = WeightForm("grouped", 4, 32)
    assert kept_in(described(checkpoint, settings)) == (
        {"qkv": WeightForm("fp8"), "inner": integers, "down": integers},
        "",
    )
