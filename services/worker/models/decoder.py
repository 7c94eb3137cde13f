"""The decoder-only transformer that every architecture here is, over a flattened batch of tokens."""

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.attention.base import AttentionStep
from services.worker.layers.attention import Attention
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import Mlp
from services.worker.layers.rotary import Rotary
from services.worker.models.config import ModelConfig


def _norm_weight(config: ModelConfig) -> nn.Parameter:
    return nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before; adding what they give to the residual stream is left to who comes next,
    so that adding and norming are one operator."""

    def __init__(self, config: ModelConfig, index: int, kernels: LayerKernels) -> None:
        super().__init__()
        self.kernels, self.eps = kernels, config.norm_eps
        self.attention_norm, self.mlp_norm = _norm_weight(config), _norm_weight(config)
        self.attention = Attention(config, index, kernels)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, config.mlp_bias, kernels)

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionStep,
    ) -> torch.Tensor:
        """``x [tokens, hidden_size]``, changed in place, lacks ``delta``; returns what it lacks after this layer."""
        if delta is None:
            normed = self.kernels.norm(x, self.attention_norm, self.eps)
        else:
            normed = self.kernels.add_norm(x, delta, self.attention_norm, self.eps)
        attended = self.attention(normed, cos, sin, attention)
        return self.mlp(self.kernels.add_norm(x, attended, self.mlp_norm, self.eps))

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the (view of a) tensor it is copied into."""
        return {
            f"{prefix}.input_layernorm.weight": self.attention_norm,
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm,
            **self.attention.targets(f"{prefix}.self_attn"),
            **self.mlp.targets(f"{prefix}.mlp"),
        }


class DecoderModel(nn.Module):
    """Weights are uninitialised until ``services.worker.weights.load`` fills them; read-only afterwards."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: LayerKernels) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        with torch.device("meta"):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
            self.layers = nn.ModuleList(DecoderLayer(config, index, kernels) for index in range(config.layers))
            self.norm = _norm_weight(config)
            self.head = None if config.tied_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.to(dtype=dtype)
        self.to_empty(device=device)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_context_tokens, dtype, device)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep) -> torch.Tensor:
        """``token_ids`` and ``positions [tokens]`` int64 -> normed hidden states ``[tokens, hidden_size]``."""
        x, delta = F.embedding(token_ids, self.embedding), None
        cos, sin = self.rotary.at(positions)
        for layer in self.layers:
            delta = layer(x, delta, cos, sin, attention)
        return self.kernels.add_norm(x, delta, self.norm, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` -> ``[rows, vocab_size]`` float32."""
        return (F.linear(hidden, self.embedding) if self.head is None else self.head(hidden)).float()

    def targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the (view of a) tensor it is copied into: exactly what a checkpoint must hold."""
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for index, layer in enumerate(self.layers):
            found |= layer.targets(f"model.layers.{index}")
        if self.head is not None:
            found |= self.head.targets("lm_head")
        return found
