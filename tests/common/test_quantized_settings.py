"""Settings of quantized checkpoints: those that libraries publish are read, and others are refused by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.model.quantized.settings import read_quantization

INT4 = {
    **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": "static"},
    **{"dynamic": False, "block_structure": None, "observer": "minmax", "observer_kwargs": {}},
}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None}


def compressed(weights: dict[str, Any] = INT4, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]},
        **{"config_groups": {"group_0": group}, "kv_cache_scheme": None, "quantization_status": "compressed"},
        **{"global_compression_ratio": 1.5, "version": "0.12.2", "sparsity_config": {}, "transform_config": {}},
    } | changes


def grouped(**changes: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors with changes of their group."""
    settings = compressed()
    settings["config_groups"]["group_0"] |= changes
    return settings


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
GPTQ = {
    **{"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "lm_head": False},
    **{"damp_percent": 0.01, "true_sequential": True, "static_groups": False, "model_name_or_path": None},
    **{"model_file_base_name": "model", "meta": {"quantizer": ["gptqmodel:1.4.0"]}, "pack_dtype": "int32"},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
QUERY, HEAD = "model.layers.0.self_attn.q_proj", "lm_head"
GATE = "model.layers.10.mlp.gate"
PUBLISHED = {
    "fp8-blocks": (FP8 | {"scale_fmt": "ue8m0"}, {QUERY: "FP8 in blocks of 128 x 128"}),
    "fp8-skipped": (FP8 | {"modules_to_not_convert": ["lm_head", GATE]}, {GATE: None, f"{GATE}_proj": "FP8 in"}),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [HEAD]}, {QUERY: "FP8"}),
    "mistral": (
        {
            **{"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
            **{"modules_to_not_convert": ["model.vision_tower", "lm_head"]},
        },
        {QUERY: "FP8", HEAD: None},
    ),
    "w4a16": (compressed(), {QUERY: "INT4 in groups of 128", HEAD: None}),
    "w8a8": (
        grouped(
            weights=INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None},
            input_activations=TOKEN | {"type": "int"},
            format="int-quantized",
        ),
        {QUERY: "INT8 with one scale per row"},
    ),
    "float": (
        grouped(weights=FLOAT, input_activations=TOKEN, format="float-quantized"),
        {QUERY: "FP8 with one scale per row"},
    ),
    "expressions": (
        compressed(ignore=["re:.*lm_head", r"re:.*mlp\.gate$", QUERY]),
        {GATE: None, f"{GATE}_proj": "INT4", QUERY: None, HEAD: None},
    ),
    "names": (grouped(targets=[QUERY, r"re:model\.layers\.[0-4]\..*"]), {QUERY: "INT4", GATE: None}),
    "gptq": (GPTQ, {QUERY: "INT4 in groups of 128", HEAD: None}),
    "gptq-head": (GPTQ | {"lm_head": True, "group_size": -1}, {HEAD: "INT4 with one scale per row"}),
    "gptq-inside": (
        GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]},
        {QUERY: "INT4", GATE: None},
    ),
    "gptq-dynamic": (
        GPTQ | {"dynamic": {r"-:.*\.mlp\..*": {}, r"+:.*q_proj": {"bits": 8, "group_size": 32}, ".*k_proj": {}}},
        {QUERY: "INT8 in groups of 32", GATE: None, QUERY.replace("q_", "k_"): "INT4 in groups of 128"},
    ),
    "awq": (AWQ | {"modules_to_not_convert": ["visual"]}, {QUERY: "INT4 in groups of 128", "model.visual.x": None}),
    "mxfp4": (MXFP4, {"model.layers.0.mlp.experts.down_proj": "MXFP4", HEAD: None}),
}


@pytest.mark.parametrize(("settings", "schemes"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_settings_give_the_schemes_of_modules(settings, schemes):
    found = read_quantization({"quantization_config": settings})
    assert found is not None
    for module, expected in schemes.items():
        scheme = found.scheme_of(module)
        assert (scheme is None) == (expected is None), module
        assert expected is None or str(scheme).startswith(expected)


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_other_checkpoints_are_not_quantized(config):
    assert read_quantization(config) is None


def weights(**changes: Any) -> dict[str, Any]:
    return compressed(INT4 | changes)


REFUSED = {
    "method": ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported"),
    "no method": ({"bits": 4}, "quant_method='unknown' is not supported"),
    "fp8 format": (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
    "fp4 experts": (FP8 | {"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    "fp8 others": (FP8 | {"modules_to_convert": ["embed"]}, r"modules_to_convert=\['embed'\]"),
    "fp8 cache": (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme=\{'num_bits': 8\}"),
    "activation scheme": (FP8 | {"activation_scheme": "block"}, "activation_scheme='block'"),
    "block of nothing": (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\]"),
    "block of halves": (FP8 | {"weight_block_size": [1.5, 128]}, r"weight_block_size=\[1\.5, 128\]"),
    "large block": (FP8 | {"weight_block_size": [1 << 62, 1]}, "weight_block_size="),
    "block": (FP8 | {"weight_block_size": 128}, "weight_block_size=128 is not supported"),
    "bits": (GPTQ | {"bits": 3}, "bits=3 is not supported; expected 4 or 8"),
    "group of nothing": (GPTQ | {"group_size": 0}, "group_size=0 is not supported"),
    "negative group": (AWQ | {"group_size": -2}, "group_size=-2 is not supported"),
    "large group": (GPTQ | {"group_size": 1 << 70}, "group_size=.* is not supported"),
    "no group": ({**GPTQ, "group_size": None}, "group_size is missing"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "is marlin": (GPTQ | {"is_marlin_format": True}, "is_marlin_format=true"),
    "planes": (GPTQ | {"format": "gptq_p"}, "format='gptq_p'"),
    "words": (GPTQ | {"pack_dtype": "int64"}, "pack_dtype='int64'"),
    "adapter": (GPTQ | {"adapter": {"name": "lora"}}, r"adapter=\{'name': 'lora'\}"),
    "dynamic bits": (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, r"dynamic\.\+:\.\*\.bits=2"),
    "dynamic key": (GPTQ | {"dynamic": {".*": {"format": "x"}}}, r"dynamic\.\.\*\.format='x'"),
    "dynamic look-around": (GPTQ | {"dynamic": {"-:(?!x).*": {}}}, r"dynamic: the regular expression '\(\?!x\)\.\*'"),
    "inside": (GPTQ | {"modules_in_block_to_quantize": [[1]]}, "modules_in_block_to_quantize="),
    "gemv": (AWQ | {"version": "gemv"}, "version='gemv'"),
    "no zeros": (AWQ | {"zero_point": False}, "zero_point=false"),
    "skipped": (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head'"),
    "cache": (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
    "sparse": (
        compressed(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config.format='sparse-24-bitmask'",
    ),
    "transform": (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config="),
    "pruned experts": (compressed(moe_sparsity_config={"method": "prune"}), "moe_sparsity_config="),
    "not compressed": (compressed(quantization_status="frozen"), "quantization_status='frozen'"),
    "no groups": (compressed(config_groups={}), r"config_groups=\{\}"),
    "named scheme": (compressed(config_groups={"W4A16": ["Linear"]}), r"config_groups\.W4A16=\['Linear'\]"),
    "2:4": (compressed(format="marlin-24"), "quantization_config.format='marlin-24'"),
    "nvfp4": (compressed(format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
    "group format": (grouped(format="mxfp4-pack-quantized"), r"config_groups\.group_0\.format='mxfp4-pack-quantized'"),
    "activations": (grouped(input_activations={"num_bits": 4, "type": "int"}), r"input_activations\.num_bits=4"),
    "outputs": (grouped(output_activations={"num_bits": 8}), r"output_activations="),
    "group key": (grouped(rotation="r1"), r"config_groups\.group_0\.rotation='r1'"),
    "weights bits": (weights(num_bits=3), r"weights\.num_bits=3"),
    "weights type": (weights(type="float"), r"weights\.type='float'"),
    "weights strategy": (weights(strategy="tensor_group"), r"weights\.strategy='tensor_group'"),
    "weights group": (weights(group_size=-1), r"weights\.group_size=-1"),
    "weights order": (weights(actorder="random"), r"weights\.actorder='random'"),
    "weights dynamic": (weights(dynamic=True), r"weights\.dynamic=True"),
    "weights block": (weights(strategy="block"), "block_structure=None is not supported"),
    "weights key": (weights(codebook="nf4"), r"weights\.codebook='nf4'"),
    "zeros of floats": (grouped(weights=FLOAT | {"symmetric": False}, format="float-quantized"), "symmetric=false"),
    "expression": (compressed(ignore=["re:("]), r"ignore: the regular expression '\(' is not supported"),
    "look-around": (grouped(targets=["re:^(?!x).*"]), r"targets: the regular expression"),
    "large expression": (compressed(ignore=["re:((a{1000}){1000}){1000}"]), "regular expression"),
    "long expression": (compressed(ignore=["re:" + "a" * 2000]), "more than 1,024 characters"),
    "many expressions": (compressed(ignore=["re:a"] * 300), "ignore has 300 entries; at most 256 are read"),
    "names": (compressed(ignore=[1]), r"ignore=\[1\] is not supported"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_other_settings_are_refused_by_name(settings, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        read_quantization({"quantization_config": settings})
    assert refused.value.message.startswith("config.json: quantization_config.")
    assert "\n" not in refused.value.message


def test_an_expression_of_a_hostile_file_takes_linear_time():
    """The name would take years with an engine that tries all ways."""
    found = read_quantization({"quantization_config": compressed(ignore=["re:(a+)+b"])})
    assert found is not None
    assert found.scheme_of("a" * 4000) is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ALL = [settings for settings, _ in PUBLISHED.values()]


@given(st.sampled_from(ALL), st.data())
def test_any_value_of_any_key_is_read_or_refused(settings, data):
    name = data.draw(st.sampled_from(sorted(settings)))
    changed = settings | {name: data.draw(VALUES)}
    try:
        found = read_quantization({"quantization_config": changed})
    except InvalidRequest as refused:
        assert "config.json: quantization_config" in refused.message  # noqa: PT017 (either is right)
    else:
        assert found is not None
        found.scheme_of(QUERY)
