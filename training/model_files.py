"""Writes and reads a built-in model as a Hugging Face directory."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import LanguageModel, ModelConfig
from training.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID

STACK = re.compile(r"(.*\.experts)\.(\w+)")  # The name of a stack of experts in a model's state.
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")  # The name of one expert's matrix in a file.
ENDS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": [END_OF_TEXT_ID, END_OF_TURN_ID]}


def architecture(shape: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that only one of the two architectures has."""
    if not shape.experts:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def save_model(model: LanguageModel, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = model.config
    config = {
        **architecture(shape),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "pad_token_id": END_OF_TEXT_ID,
        **ENDS,
    }
    generation = {**ENDS, "pad_token_id": END_OF_TEXT_ID}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in unstack_experts(model.state_dict()).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_model(directory: Path) -> LanguageModel:
    """Return the model that `save_model` wrote, in float32."""
    config = json.loads((directory / "config.json").read_text())
    shape = ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config.get("moe_intermediate_size", config["intermediate_size"]),
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        context=config["max_position_embeddings"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        experts=config.get("num_experts", 0),
        experts_per_token=config.get("num_experts_per_tok", 0),
    )
    model = LanguageModel(shape)
    weights = {name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()}
    model.load_state_dict(stack_experts(weights))
    return model


def unstack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, in which each expert's matrices have names of their own."""
    named = {}
    for name, weight in weights.items():
        if stack := STACK.fullmatch(name):
            for expert, matrix in enumerate(weight):
                named[f"{stack[1]}.{expert}.{stack[2]}.weight"] = matrix
        else:
            named[name] = weight
    return named


def stack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a model from a checkpoint's tensors: the inverse of `unstack_experts`."""
    named: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, weight in weights.items():
        if expert := EXPERT.fullmatch(name):
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = weight
        else:
            named[name] = weight
    return named | {name: torch.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()}
