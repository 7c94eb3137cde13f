"""GGUF files give the models from which they were made."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.model.files import read_config
from services.common.model.gguf_file import BLOCK_TYPES
from services.worker.described.registry import read_model_config
from services.worker.models import weights
from services.worker.models.gguf_shard import open_shard
from tests.checkpoints import LLAMA3_ROPE
from tests.gguf_files import ARCHITECTURES, write, write_gguf
from tests.worker.test_generation import greedy, prompt_of

# What a file can say: numbers are float32, and Gemma's scale follows from the size of a head.
SETTINGS = {
    "gemma2": {"tied": True, "query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.5},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "mixtral": {"intermediate_size": 64},
    "qwen2": {"tied": True},
    "qwen3": {"tied": True},
}
# Written by the library; it does not write K quants.
WRITTEN = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_describes_the_model_of_the_checkpoint(architecture, checkpoint, tmp_path):
    """The description is equal, and each tensor."""
    directory = checkpoint(architecture, **SETTINGS.get(architecture, {}))
    path = write_gguf(tmp_path / "model.gguf", directory)
    described = read_model_config(read_config(path))
    expected = read_model_config(read_config(directory))
    numbers = {"norm_eps": described.norm_eps, "naming": described.naming}  # eps is a float32 number in the file
    assert described.norm_eps == pytest.approx(expected.norm_eps)
    assert described == replace(expected, **numbers)
    with open_shard(path) as found, open_shard(directory / "model.safetensors") as stored:
        assert sorted(found.keys()) == sorted(stored.keys())
        for name in found.keys():  # noqa: SIM118 (not a mapping)
            values = stored.get_tensor(name)
            torch.testing.assert_close(found.get_tensor(name), values, rtol=0, atol=1e-6)


ROTATIONS = {
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        {"type": "yarn", "factor": 4.0, "original_context_length": 256},
    ),
    "linear": ({"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}),
    "longrope": (
        {
            **{"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 1.5] * 4},
            **{"original_max_position_embeddings": 256, "attention_factor": 1.25},
        },
        {"original_context_length": 256, "attn_factor": 1.25},
    ),
}


@pytest.mark.parametrize(("rotation", "fields"), ROTATIONS.values(), ids=ROTATIONS)
def test_a_file_describes_the_rotation_of_the_checkpoint(rotation, fields, checkpoint, tmp_path):
    longrope = rotation["rope_type"] == "longrope"
    directory = checkpoint("phi3" if longrope else "llama", rope_scaling=rotation)
    if longrope:  # the length beside the settings counts for Phi-3
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": 256}))
    prefix = "phi3" if longrope else "llama"
    scaling = {f"{prefix}.rope.scaling.{name}": value for name, value in fields.items()}
    path = write_gguf(tmp_path / "model.gguf", directory, **scaling)
    found, expected = (read_model_config(read_config(each)) for each in (path, directory))
    assert (found.ropes, found.max_context_tokens) == (expected.ropes, expected.max_context_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_the_checkpoint(architecture, checkpoint, reference, runner_for, tmp_path):
    directory = checkpoint(architecture, **SETTINGS.get(architecture, {}))
    path = write_gguf(tmp_path / "model.gguf", directory)
    (tokens,) = runner_for(path).generate([prompt_of(77)], 20, chunk=30)
    assert tokens == greedy(reference(directory), prompt_of(77), 20)


@pytest.mark.slow
def test_factors_of_the_rotation_are_those_of_llama3(checkpoint, reference, runner_for, tmp_path):
    directory = checkpoint("llama", rope_scaling=LLAMA3_ROPE)
    path = write_gguf(tmp_path / "model.gguf", directory)
    (tokens,) = runner_for(path).generate([prompt_of(300)], 20, chunk=100)
    assert tokens == greedy(reference(directory), prompt_of(300), 20)


@pytest.mark.parametrize("kind", WRITTEN)
def test_written_blocks_are_read(kind, checkpoint, tmp_path):
    """The values are those that the library reads, in the layout of the checkpoint."""
    quantization = gguf.GGMLQuantizationType[kind]
    wide = {"hidden_size": 256, "intermediate_size": 512} if kind.startswith("TQ") else {}
    directory = checkpoint("qwen2", **wide)
    path = write_gguf(tmp_path / "model.gguf", directory, kind=quantization)
    exact = write_gguf(tmp_path / "exact.gguf", directory)
    with open_shard(path) as quantized, open_shard(exact) as original:
        for name in original.keys():  # noqa: SIM118 (not a mapping)
            values, found = original.get_tensor(name), quantized.get_tensor(name)
            if values.dim() > 1:
                blocks = gguf.quants.quantize(values.numpy(), quantization)
                values = torch.from_numpy(gguf.quants.dequantize(blocks, quantization))
            assert torch.equal(found.float(), values), name


def reference_types() -> dict[str, int]:
    """Return the numbers of the types that transformers converts with code of its own, by their names."""
    from transformers.integrations.gguf import dequant

    return {name: number for number, name in dequant.GGML_NAME.items()}


@pytest.mark.parametrize("kind", sorted(reference_types()))
def test_blocks_have_the_values_of_transformers(kind, tmp_path):
    from transformers.integrations.gguf import dequant

    number = reference_types()[kind]
    block = BLOCK_TYPES[number]
    assert block.name == kind
    content = np.random.default_rng(number).integers(0, 256, (6, 2 * block.nbytes), dtype=np.uint8)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"attention.head_count": 1, "embedding_length": 2 * block.elements, "block_count": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key in ("context_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("blk.0.ffn_up.weight", content, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    write(writer, path)
    expected = dequant.dequantize(torch.from_numpy(content), number).reshape(6, -1)
    with open_shard(path) as shard:
        name = "model.layers.0.mlp.up_proj.weight"
        found, part = shard.get_tensor(name), shard.get_slice(name)[2:4, 8:]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(part, expected[2:4, 8:], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gemma3"])
def test_slices_are_those_of_the_whole_tensors(architecture, checkpoint, tmp_path):
    directory = checkpoint(architecture, **SETTINGS.get(architecture, {}))
    path = write_gguf(tmp_path / "model.gguf", directory, kind=gguf.GGMLQuantizationType.Q8_0)
    with open_shard(path) as shard:
        for name in shard.keys():  # noqa: SIM118 (not a mapping)
            whole, part = shard.get_tensor(name), shard.get_slice(name)
            assert part.get_shape() == list(whole.shape)
            for index in (slice(8, 24), slice(None), ..., slice(0, 20, 2), (slice(None), slice(1, 9)), slice(5, 5)):
                if not isinstance(index, tuple) or whole.dim() > 1:
                    assert torch.equal(part[index], whole[index]), (name, index)


@pytest.mark.slow
def test_transformers_computes_the_same_from_the_file(checkpoint, runner_for, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", checkpoint("qwen3"))
    (tokens,) = runner_for(path, model_impl="transformers").generate([prompt_of(40)], 12)
    assert [tokens] == runner_for(checkpoint("qwen3")).generate([prompt_of(40)], 12)


def test_a_tensor_of_another_shape_is_refused(checkpoint, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama"), **{"llama.feed_forward_length": 192})
    with pytest.raises(InvalidRequest, match=r"mlp\.\w+_proj\.weight has shape \[.*\], config.json asks for"):
        weights.check(path, read_model_config(read_config(path)))
