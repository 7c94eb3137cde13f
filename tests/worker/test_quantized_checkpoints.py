"""Quantized checkpoints give the logits of a checkpoint with the values that they mean."""

import re
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from services.cli.doctor.findings import Level
from services.common.errors import InvalidRequest
from services.common.model.json_object import read_json
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from services.worker.layers.fp8 import quantize_rows
from services.worker.models import weights
from services.worker.models.quantized_shards import weight_files
from tests import quantized_files as files
from tests.cli.looking import only
from tests.quantized_files import Store, compressed
from tests.worker.parallel.test_loading import grid, load
from tests.worker.test_generation import greedy, prompt_of
from tests.worker.test_models import logits_of

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TOKENS = np.random.default_rng(0).integers(0, 390, 60).tolist()
EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj$")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [16, 32]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def gptq(size: int, **others: Any) -> dict[str, Any]:
    """Return the settings of GPTQ as libraries write them, with keys that say how a checkpoint was made."""
    making = {"damp_percent": 0.01, "true_sequential": True, "static_groups": False, "meta": {"quantizer": ["x:1"]}}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": True}
    return settings | {"lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32"} | making | others


def awq(size: int) -> dict[str, Any]:
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return settings | {"modules_to_not_convert": None}


@dataclass(frozen=True)
class Case:
    """A way to store a model, and the settings that describe it."""

    store: Store
    settings: dict[str, Any]
    architecture: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    chosen: re.Pattern[str] = files.LINEAR  # names of the weights that are quantized


ROW = {"name": ".weight_scale"}
CASES = {
    "fp8-tensor": Case(files.fp8(0, 0, name=".weight_scale", shape=()), FP8),
    "fp8-row": Case(files.fp8(1, 0, **ROW), FP8 | {"activation_scheme": "static"}, "qwen3", {"tied": True}),
    "fp8-blocks": Case(files.fp8(16, 32), BLOCKS, "qwen3"),
    "fp8-blocks-cut": Case(files.fp8(48, 80), FP8 | {"weight_block_size": [48, 80]}),
    "fp8-blocks-experts": Case(files.fp8(16, 32), BLOCKS, "qwen3_moe", {"moe_intermediate_size": 64}),
    "fp8-tensor-fused": Case(files.fp8(0, 0, name=".weight_scale", shape=(1,)), FP8, "phi3"),
    "float-row": Case(
        files.fp8(1, 0, **ROW),
        compressed("float-quantized", FLOAT, ignore=["re:.*lm_head"]),
        "qwen2",
        {"tied": True},
    ),
    "float-tensor": Case(
        files.fp8(0, 0, name=".weight_scale", shape=(1,)),
        compressed("naive-quantized", FLOAT | {"strategy": "tensor"}),
    ),
    "float-blocks": Case(
        files.fp8(16, 32, **ROW),
        compressed("float-quantized", FLOAT | {"strategy": "block", "block_structure": [16, 32]}),
    ),
    "int8-row": Case(files.int8(-1), compressed("int-quantized", INT8)),
    "int8-row-zeros": Case(
        files.int8(-1, symmetric=False), compressed("int-quantized", INT8 | {"symmetric": False}), "qwen3"
    ),
    "int8-groups": Case(files.int8(64), compressed("naive-quantized", INT8 | {"strategy": "group", "group_size": 64})),
    "int4-groups": Case(files.pack_quantized(32), compressed("pack-quantized", INT4)),
    "int4-groups-128": Case(
        files.pack_quantized(128, symmetric=False),
        compressed("pack-quantized", INT4 | {"group_size": 128, "symmetric": False, "actorder": "static"}),
        "qwen3",
    ),
    "int4-row": Case(
        files.pack_quantized(-1, symmetric=False),
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}),
    ),
    "int4-order": Case(
        files.pack_quantized(32, order=True), compressed("pack-quantized", INT4 | {"actorder": "group"})
    ),
    "int8-packed": Case(
        files.pack_quantized(64, bits=8), compressed("pack-quantized", INT4 | {"num_bits": 8, "group_size": 64})
    ),
    "gptq-32": Case(files.gptq(32), gptq(32, sym=False)),
    "gptq-64-order": Case(files.gptq(64, order=True), gptq(64, desc_act=True), "qwen2", {"tied": True}),
    "gptq-128-symmetric": Case(files.gptq(128, symmetric=True), gptq(128)),
    "gptq-rows": Case(files.gptq(-1), gptq(-1)),
    "gptq-v2": Case(files.gptq(32, version=2), gptq(32, checkpoint_format="gptq_v2")),
    "gptq-8-bits": Case(files.gptq(32, bits=8), gptq(32, bits=8)),
    "awq-32": Case(files.awq(32), awq(32)),
    "awq-64-experts": Case(files.awq(64), awq(64), "mixtral"),
    "awq-128": Case(files.awq(128), awq(128), "qwen2"),
    "awq-rows": Case(files.awq(-1), awq(-1)),
    "mxfp4": Case(
        files.mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        "gpt_oss",
        chosen=EXPERTS,
    ),
}


@pytest.fixture(scope="session")
def quantized(checkpoint, tmp_path_factory):
    """``quantized(case)``: the directory of a quantized checkpoint, and that of one with its values."""
    made = {}

    def make(case: Case | str):
        case = CASES[case] if isinstance(case, str) else case
        if id(case) not in made:
            source = checkpoint(case.architecture, **SIZES | case.sizes)
            place = tmp_path_factory.mktemp("quantized") / "model"
            made[id(case)] = files.write_quantized(source, place, case.store, case.settings, chosen=case.chosen)
        return made[id(case)]

    return make


def check(directory) -> None:
    weights.check(directory, read_model_config(read_json(directory / "config.json")))


def opened(directory):
    """Return a context with the tensors of a checkpoint that is quantized."""
    [(_, opens)] = weight_files(directory)
    return opens()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_values(name, quantized):
    directory, exact = quantized(name)
    check(directory)
    expected = logits_of(exact, TOKENS)
    torch.testing.assert_close(logits_of(directory, TOKENS), expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-blocks-experts"])
def test_fp8_in_blocks_has_the_values_of_transformers(name, quantized):
    directory, _ = quantized(name)
    tensors = files.load_file(directory / "model.safetensors")
    names = [key for key, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(names) >= 14
    with opened(directory) as shard:
        for key in names:
            expected = Fp8Dequantize(None)._dequantize_one(tensors[key], tensors[f"{key}_scale_inv"])  # noqa: SLF001
            torch.testing.assert_close(shard.get_tensor(key), expected, atol=0, rtol=1e-6)


def test_mxfp4_has_the_values_of_transformers(quantized):
    directory, exact = quantized("mxfp4")
    tensors = files.load_file(directory / "model.safetensors")
    names = [key.removesuffix("_blocks") for key in tensors if key.endswith("_blocks")]
    assert len(names) == 4
    with opened(directory) as shard:
        assert sorted(shard.keys()) == sorted(files.load_file(exact / "model.safetensors"))
        for key in names:
            parts = tensors[f"{key}_blocks"], tensors[f"{key}_scales"]
            expected = convert_moe_packed_tensors(*parts, dtype=torch.float32)
            assert torch.equal(shard.get_tensor(key), expected)
            assert torch.equal(shard.get_slice(key)[3], expected[3])


@pytest.mark.parametrize("name", ["fp8-blocks-experts", "gptq-64-order", "awq-64-experts", "int8-row-zeros", "mxfp4"])
def test_logits_are_those_of_transformers_with_the_values(name, quantized, reference):
    directory, exact = quantized(name)
    with torch.inference_mode():
        expected = reference(exact)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(directory, TOKENS), expected, atol=1e-3, rtol=0)


def test_scales_may_be_powers_of_two(quantized, tmp_path):
    directory = shutil.copytree(quantized("fp8-blocks")[0], tmp_path / "model")
    name = "model.layers.0.mlp.up_proj"
    with opened(directory) as shard:
        before = shard.get_tensor(f"{name}.weight")
    powers = torch.full((16, 4), 127 + 3, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    codes = files.load_file(directory / "model.safetensors")[f"{name}.weight"]
    files.change_tensors(directory, **{f"{name}.weight_scale_inv": powers})
    with opened(directory) as shard:
        found = shard.get_tensor(f"{name}.weight")
    assert torch.equal(found, codes.float() * 8)
    assert not torch.equal(found, before)


def test_zeros_carry_as_gptqmodel_adds_one():
    """A stored zero of 15 carries into its neighbour: GPTQModel subtracts and adds one to whole words."""
    stored = files.gptq(32)(np.arange(-3.0, 61.0).reshape(2, 32))  # a row has no zero inside of its range
    assert stored.parts[".qzeros"].shape == (1, 1)
    words = (stored.parts[".qzeros"].numpy() + np.int32(0x11111111)).view(np.uint32)
    assert [(int(words[0, 0]) >> 4 * row) & 15 for row in range(2)] == [1, 0]


@pytest.mark.parametrize("parts", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    "name", ["fp8-blocks", "fp8-blocks-experts", "gptq-64-order", "awq-32", "int4-groups-128", "mxfp4"]
)
def test_ranks_have_the_shares_of_the_values(name, parts, quantized):
    """Groups and blocks need not end where shares do."""
    directory, exact = quantized(name)
    for ranks in grid(*parts):
        found, expected = load(directory, ranks).state_dict(), load(exact, ranks).state_dict()
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["fp8-blocks-experts", "mxfp4"])
def test_whole_experts_of_ranks_have_their_values(name, quantized):
    directory, exact = quantized(name)
    for rank in range(2):
        ranks = Ranks(rank, 2, whole_experts=True)
        found, expected = load(directory, ranks).state_dict(), load(exact, ranks).state_dict()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-6)


def test_parts_of_a_weight_may_lie_in_different_files(checkpoint, tmp_path):
    source = checkpoint("llama", **SIZES)
    directory, exact = files.write_quantized(source, tmp_path / "model", files.gptq(32), gptq(32))
    tensors = files.load_file(directory / "model.safetensors")
    placed = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(placed.values()):
        chosen = {name: tensor for name, tensor in tensors.items() if placed[name] == file}
        files.save_file(chosen, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(files.json.dumps({"weight_map": placed}))
    check(directory)
    torch.testing.assert_close(logits_of(directory, TOKENS), logits_of(exact, TOKENS), atol=1e-4, rtol=0)


def test_groups_of_modules_have_their_own_schemes(checkpoint, tmp_path):
    """An exact name counts before a class, and ignored modules are not quantized."""
    source = checkpoint("qwen3", **SIZES)

    settings = compressed("mixed-precision", INT4, ignore=["lm_head", r"re:.*layers\.1\.mlp.*"])
    settings["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": FLOAT, "format": "float-quantized"},
    }
    attention = re.compile(r".*self_attn\.\w_proj\.weight$")
    first, exact = files.write_quantized(source, tmp_path / "first", files.fp8(1, 0, **ROW), settings, chosen=attention)
    mlp = re.compile(r".*layers\.0\.mlp\.\w+_proj\.weight$")
    directory, _ = files.write_quantized(first, tmp_path / "both", files.pack_quantized(32), settings, chosen=mlp)
    _, exact = files.write_quantized(exact, tmp_path / "exact", files.pack_quantized(32), settings, chosen=mlp)
    files.change_config(exact, quantization_config=None)
    check(directory)
    torch.testing.assert_close(logits_of(directory, TOKENS), logits_of(exact, TOKENS), atol=1e-4, rtol=0)


def test_fp8_quantizes_the_values_of_another_scheme(quantized):
    directory, exact = quantized("int4-groups")
    found, expected = (load(each, Ranks(), "fp8").state_dict() for each in (directory, exact))
    name = next(key for key in expected if expected[key].dtype == torch.float8_e4m3fn)
    assert torch.equal(found[name].float(), expected[name].float())


def test_fp8_of_rows_stays_as_it_was(quantized):
    """Rows whose largest code is 448 are quantized again to the same codes."""
    directory, exact = quantized("fp8-row")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = files.load_file(directory / "model.safetensors")
    again = quantize_rows(files.load_file(exact / "model.safetensors")[name])
    assert torch.equal(again.rows.float(), tensors[name].float())


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_the_architecture_lacks_must_be_zero(value, quantized, tmp_path):
    """AutoGPTQ writes a bias for each module."""
    directory, exact = quantized("gptq-32")
    directory = shutil.copytree(directory, tmp_path / "model")
    files.change_tensors(directory, **{"model.layers.0.mlp.up_proj.bias": torch.full((256,), value).half()})
    check(directory)
    assert only("weights", directory).level is Level.OK
    if value:
        with pytest.raises(InvalidRequest, match=r"1 tensors have no place .* model\.layers\.0\.mlp\.up_proj\.bias"):
            logits_of(directory, TOKENS)
    else:
        torch.testing.assert_close(logits_of(directory, TOKENS), logits_of(exact, TOKENS), atol=1e-4, rtol=0)


def test_a_tied_head_must_have_the_values_of_the_embedding(quantized, tmp_path):
    directory = shutil.copytree(quantized("gptq-32")[0], tmp_path / "model")
    files.change_config(directory, tie_word_embeddings=True)
    with pytest.raises(InvalidRequest, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        check(directory)


@pytest.mark.slow
def test_a_worker_serves_a_quantized_checkpoint(quantized, reference, runner_for):
    directory, exact = quantized("awq-32")
    (tokens,) = runner_for(directory).generate([prompt_of(50)], 12)
    assert tokens == greedy(reference(exact), prompt_of(50), 12)
