"""GGUF files of the tiny checkpoints of ``tests/checkpoints.py``, written by the library ``gguf`` as llama.cpp does.

Names of tensors are those of the library, so that they are not written twice.
"""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch

from tests.quantized_files import LINEAR

_NAMES = {"gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(\w+)\.weight")
_INTERLEAVED = ("llama", "granite", "smollm3")
F32 = gguf.GGMLQuantizationType.F32
# Architectures of GGUF files, by those of the checkpoints.
ARCHITECTURES = (
    *("gemma2", "gemma3", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3"),
    *("qwen3_moe", "smollm3"),
)
# A model of one layer, with which nothing can be computed.
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
KINDS = [2, 3, 3, *(6,) * 256, *(1,) * 6]
FIELDS = {
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.scores": [float(-token) for token in range(len(TOKENS))],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}
_LAYER = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (8, 8)),
    **{"ffn_gate": (16, 8), "ffn_up": (16, 8), "ffn_down": (8, 16), "attn_norm": (8,), "ffn_norm": (8,)},
}
_TENSORS = {"token_embd.weight": (len(TOKENS), 8), "output_norm.weight": (8,)}
_TENSORS |= {f"blk.0.{name}.weight": shape for name, shape in _LAYER.items()}


def write_gguf(
    path: Path,
    directory: Path,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    blocks: Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    pre: str = "gpt-2",
    **fields: Any,
) -> Path:
    """Write the checkpoint in ``directory`` to the file ``path``, its matrices as ``kind``. Return ``path``.

    ``blocks`` returns the content of a matrix, by its name in the file, and its type. ``fields`` are added to those of
    the architecture; a value of None leaves one out.
    """
    config = json.loads((directory / "config.json").read_text())
    name = _NAMES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, name)
    given = {f"{name}.{key}": value for key, value in _sizes(config).items()} | _tokenizer(directory, pre)
    for key, value in (given | fields).items():
        _add(writer, key, value)
    for key, tensor in _tensors(directory, name, config).items():
        if tensor.ndim > 1 and blocks is not None:
            content, raw = blocks(key, tensor)
            writer.add_tensor(key, content, raw_dtype=raw)
        elif tensor.ndim > 1 and kind != F32:
            writer.add_tensor(key, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, tensor)
    return write(writer, path)


def write_quantized_gguf(source: Path, target: Path, kind: str) -> tuple[Path, Path]:
    """Write the file ``target`` of ``source``, matrices of layers in blocks of the type ``kind``.

    Blocks of K types, which the library cannot make, are random. Return ``target``, and the directory of a checkpoint
    with the exact values.
    """
    exact, raw = target.with_suffix(""), gguf.GGMLQuantizationType[kind]
    shutil.copytree(source, exact)
    tensors, content = safetensors.torch.load_file(source / "model.safetensors"), {}
    for name in filter(LINEAR.match, tensors):
        rows = tensors[name].numpy()
        packed = random_blocks(kind, rows.shape) if kind.endswith("_K") else gguf.quants.quantize(rows, raw)
        values = gguf.quants.dequantize(packed, raw)
        tensors[name] = torch.from_numpy(values)
        content |= {row.tobytes(): blocks for row, blocks in zip(values, packed, strict=True)}
    safetensors.torch.save_file(tensors, exact / "model.safetensors", metadata={"format": "pt"})

    def blocks(_: str, tensor: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        rows = tensor.reshape(-1, tensor.shape[-1])
        if rows[0].tobytes() not in content:
            return tensor, F32
        return np.stack([content[row.tobytes()] for row in rows]).reshape(*tensor.shape[:-1], -1), raw

    return write_gguf(target, exact, blocks=blocks), exact


def write(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write all that was added to ``writer``, and close the file. Return ``path``."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attention.scale": config.get("attention_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "logit_scale": config.get("logits_scaling"),
    }
    rope = config["rope_parameters"]
    if config["model_type"].startswith("gemma"):
        found["attention.sliding_window"] = config["sliding_window"]
    if "full_attention" in rope:
        found["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    return found | {"rope.freq_base": rope["rope_theta"]}


def _tokenizer(directory: Path, pre: str) -> dict[str, Any]:
    described = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    model, special = described["model"], {each["content"] for each in described["added_tokens"]}
    ids = model["vocab"] | {each["content"]: each["id"] for each in described["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    byte_level = not model["byte_fallback"]
    kinds = [3 if token in special else 6 if re.fullmatch("<0x..>", token) else 1 for token in tokens]
    found: dict[str, Any] = {"model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in model["merges"]]}
    if not byte_level:
        kinds[tokens.index("<unk>")] = 2
        found = {"model": "llama", "scores": [float(-token) for token in range(len(tokens))]}
    found |= {"tokens": tokens, "token_type": kinds, "add_bos_token": settings["add_bos_token"]}
    found |= {f"{name}_token_id": tokens.index(settings[f"{name}_token"]) for name in ("bos", "eos")}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | {
        "tokenizer.chat_template": settings["chat_template"]
    }


def _tensors(directory: Path, name: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of the checkpoint by their names in the file, float32."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= safetensors.torch.load_file(path)
    stacked: dict[str, list[torch.Tensor]] = {}
    for key in sorted(stored, key=lambda each: [int(part) if part.isdigit() else 0 for part in each.split(".")]):
        if match := _EXPERT.fullmatch(key):
            stacked.setdefault(f"{match[1]}.{match[3]}.weight", []).append(stored.pop(key))
    stored |= {key: torch.stack(parts) for key, parts in stacked.items()}
    [architecture] = [key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {}
    for key, tensor in stored.items():
        tensor = tensor.float()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(key.split(".")[-2])
        if heads and name in _INTERLEAVED:
            tensor = tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            tensor = tensor + 1
        found[names.get_name(key, try_suffixes=(".weight", ".bias"))] = tensor.contiguous().numpy()
    for length in ("short", "long"):
        if factors := config["rope_parameters"].get(f"{length}_factor"):
            found[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    if config["rope_parameters"].get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(config)
    return found


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """Return the factors of the frequencies, as in llama.cpp's converter."""
    rope, size = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"]
    low, high, original = (
        rope[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for index in range(0, size, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (index / size)
        smooth = min(1.0, max(0.0, (original / wave - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def model(path: Path, architecture: str = "llama", **changes: object) -> Path:
    """Write a tiny model. ``changes`` are values of fields; None leaves a field out."""
    writer = gguf.GGUFWriter(path, architecture)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in (FIELDS | changes).items():
        if value is not None:
            kinds.get(type(value), writer.add_array)(name, value)
    for name, shape in _TENSORS.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    return write(writer, path)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return random blocks of the type ``kind`` for a tensor of ``shape``, ``[*shape[:-1], bytes]`` uint8.

    Scales are from 1e-4 to 1e-3.
    """
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    content = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    halves = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    scales = generator.uniform(1e-4, 1e-3, (*content.shape[:-1], halves)).astype(np.float16)
    scale_bytes = slice(-2, None) if kind == "Q6_K" else slice(2 * halves)
    content[..., scale_bytes] = scales.view(np.uint8)
    return content.reshape(*shape[:-1], -1)
