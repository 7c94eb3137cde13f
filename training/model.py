"""A Llama-architecture language model in plain torch, with Hugging Face's parameter names."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID, VOCAB_SIZE


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape. Few wide layers and two key-value heads, for quick serving on CPUs."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 384
    intermediate_size: int = 672
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0  # Of the embeddings and of what each part adds, in training only.


# Keys and values of one layer, each [batch, kv_heads, capacity, head_dim].
LayerCache = tuple[Tensor, Tensor]


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each float32 [context, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.context).float(), config.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, head_dim] by tables [length, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention, over a cache of earlier positions if one is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None, start: int) -> Tensor:
        """x [batch, length, hidden] at positions start.. -> the same shape.

        With a cache, `length` is 1: its entry at `start` is written, those before it are read.
        """
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if cache is not None:
            end = start + length
            cache[0][:, :, start:end], cache[1][:, :, start:end] = k, v
            k, v = cache[0][:, :, :end], cache[1][:, :, :end]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """The gated feed-forward part, x [..., hidden] -> the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None, start: int) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """The whole model; its state_dict has the names of `LlamaForCausalLM`, head tied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(config.dropout)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config) for _ in range(config.layers)),
                "norm": nn.RMSNorm(config.hidden_size, config.norm_eps),
            }
        )
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights of deviation 0.02, less for those that write into the residual sum."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_sum = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * self.config.layers) ** -0.5 if into_sum else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> list[LayerCache]:
        """An empty cache of `capacity` positions for `batch` sequences."""
        shape = (batch, self.config.kv_heads, capacity, self.config.head_dim)
        device = self.cos.device
        pair = lambda: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
        return [(pair(), pair()) for _ in range(self.config.layers)]

    def forward(self, tokens: Tensor, cache: list[LayerCache] | None = None, start: int = 0) -> Tensor:
        """tokens int64 [batch, length] at positions start.. -> logits [batch, length, vocab]."""
        length = tokens.shape[1]
        cos, sin = self.cos[start : start + length], self.sin[start : start + length]
        x = self.dropout(self.model["embed_tokens"](tokens))
        for index, layer in enumerate(self.model["layers"]):
            x = layer(x, cos, sin, None if cache is None else cache[index], start)
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


def save_model(model: Llama, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = model.config
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": [END_OF_TEXT_ID, END_OF_TURN_ID]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "pad_token_id": END_OF_TEXT_ID,
        **ends,
    }
    generation = {**ends, "pad_token_id": END_OF_TEXT_ID}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_model(directory: Path) -> Llama:
    """The model that `save_model` wrote, in float32."""
    config = json.loads((directory / "config.json").read_text())
    shape = ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        context=config["max_position_embeddings"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = Llama(shape)
    weights = {name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model
