"""The built-in language models in plain torch: Llama's architecture, and Qwen3-MoE's if there are experts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.experts import RoutedExperts
from training.tokenizer import VOCAB_SIZE


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. The defaults have few wide layers and two key-value heads, for quick serving on CPUs.

    With `experts`, the model is a Qwen3-MoE: each layer's feed-forward part is a mixture of experts that are
    `intermediate_size` wide, and queries and keys have norms. Without experts, it is a Llama.
    """

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
    experts: int = 0
    experts_per_token: int = 0
    dropout: float = 0.0  # Of the embeddings and of the output of each part, in training only.


# Keys and values of one layer, each [batch, kv_heads, capacity, head_dim].
LayerCache = tuple[Tensor, Tensor]


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, each float32 [context, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.context).float(), config.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [batch, heads, length, head_dim] by tables [length, head_dim]."""
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
        if config.experts:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None, start: int) -> Tensor:
        """Return the result for x [batch, length, hidden] at the positions from `start` on, of the same shape.

        With a cache, `length` is 1. The entry of the cache at `start` is written, and those before it are read.
        """
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q, k = self.q_proj(x).view(heads), self.k_proj(x).view(heads)
        if hasattr(self, "q_norm"):  # In float32, the dtype of the norms' weights.
            q, k = self.q_norm(q.float()).to(q.dtype), self.k_norm(k.float()).to(k.dtype)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if cache is not None:
            end = start + length
            cache[0][:, :, start:end], cache[1][:, :, start:end] = k, v
            k, v = cache[0][:, :, :end], cache[1][:, :, :end]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """The gated feed-forward part of a layer of Llama."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result for x [..., hidden], of the same shape, and a balance loss of zero: there is no router."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), x.new_zeros(())


class Layer(nn.Module):
    """Decoder layer: attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = make_mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None, start: int
    ) -> tuple[Tensor, Tensor]:
        """Return the result for x [batch, length, hidden], of the same shape, and the balance loss of the router."""
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        x = x + self.dropout(mixed)
        added, balance = self.mlp(self.post_attention_layernorm(x))
        return x + self.dropout(added), balance


def make_mlp(config: ModelConfig) -> nn.Module:
    """Return the feed-forward part of one layer."""
    if not config.experts:
        return Mlp(config)
    return RoutedExperts(config.hidden_size, config.intermediate_size, config.experts, config.experts_per_token)


class LanguageModel(nn.Module):
    """The whole model, with a tied head. Parameters have the names of transformers, except for stacked experts."""

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
        """Draw normal weights of deviation 0.02, or less for those that write into the residual sum."""
        for name, weight in self.named_parameters():
            if weight.ndim >= 2:
                into_sum = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
                scale = (2 * self.config.layers) ** -0.5 if into_sum else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> list[LayerCache]:
        """Return an empty cache of `capacity` positions for `batch` sequences."""
        shape = (batch, self.config.kv_heads, capacity, self.config.head_dim)
        device = self.cos.device
        pair = lambda: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
        return [(pair(), pair()) for _ in range(self.config.layers)]

    def forward(self, tokens: Tensor, cache: list[LayerCache] | None = None, start: int = 0) -> Tensor:
        """Return the logits [batch, length, vocab] of tokens int64 [batch, length], at positions from `start` on."""
        return self.logits_and_balance(tokens, cache, start)[0]

    def logits_and_balance(
        self, tokens: Tensor, cache: list[LayerCache] | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the logits and the routers' mean balance loss, a scalar."""
        length = tokens.shape[1]
        cos, sin = self.cos[start : start + length], self.sin[start : start + length]
        x = self.dropout(self.model["embed_tokens"](tokens))
        balances = []
        for index, layer in enumerate(self.model["layers"]):
            x, balance = layer(x, cos, sin, None if cache is None else cache[index], start)
            balances.append(balance)
        logits = F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)
        return logits, torch.stack(balances).mean()
