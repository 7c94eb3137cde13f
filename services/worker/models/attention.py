"""Self-attention of one layer: projections and rotation. The attention backend computes scores and stores the cache."""

from typing import Any

import torch
from torch import nn

from services.worker.attention.base import AttentionStep, HeadNorms, RotatingAttentionStep
from services.worker.described.config import ModelConfig
from services.worker.described.layer import AttentionConfig
from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import LinearMaker
from services.worker.parallel.exchange import Exchange


class Attention(nn.Module):
    """Grouped-query attention with one matrix for q, k and v.

    The caller applies ``output``, because not every token needs it.
    """

    def __init__(
        self,
        config: ModelConfig,
        features: AttentionConfig,
        kernels: LayerKernels,
        linear: LinearMaker,
        *,
        adds_bias: bool = True,
    ) -> None:
        """Create uninitialised weights for ``config``, this rank's share of the model, and ``features``.

        If ``adds_bias`` is false, ``output`` has no bias, because another rank adds it.
        """
        super().__init__()
        self.kernels, self.eps = kernels, config.norm_eps
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = linear(config.hidden_size, widths, features.qkv_bias)
        self.output = linear(widths[0], config.hidden_size, features.output_bias and adds_bias)
        self.q_norm = self.k_norm = None
        if features.qk_norm == "per_head":
            self.q_norm = nn.Parameter(torch.empty(self.head_dim), requires_grad=False)
            self.k_norm = nn.Parameter(torch.empty(self.head_dim), requires_grad=False)

    @property
    def norms(self) -> HeadNorms | None:
        """The norms of queries and keys, or None if they are not normalised."""
        queries, keys = self.q_norm, self.k_norm
        return None if queries is None or keys is None else HeadNorms(queries, keys, self.eps)

    def forward(
        self,
        index: int,
        x: torch.Tensor | Quantized,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        attention: AttentionStep | RotatingAttentionStep,
        exchange: Exchange,
        tokens: int,
    ) -> torch.Tensor:
        """Return the attended values ``[tokens, heads * head_dim]`` of layer ``index``, the input of ``output``.

        ``x [rows, hidden_size]`` holds this rank's rows. ``cos`` and ``sin [tokens, 1, head_dim]`` are None if
        ``attention`` rotates queries and keys itself.
        """
        projected = exchange.column(x, self.qkv, tokens)
        if attention.rotates:
            return attention.run_qkv(index, projected, self.norms)
        kernels, norms = self.kernels, self.norms
        heads = projected.view(projected.shape[0], -1, self.head_dim)
        rotated, values = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if norms is not None:
            queries, keys = rotated.split((self.heads, self.kv_heads), dim=1)
            normed = kernels.norm(queries, norms.queries, norms.eps), kernels.norm(keys, norms.keys, norms.eps)
            rotated = torch.cat(normed, dim=1)
        rotated = kernels.rotate(rotated, cos, sin)  # type: ignore[arg-type]  # not None here
        queries, keys = rotated.split((self.heads, self.kv_heads), dim=1)
        return attention.run(index, queries, keys, values)

    def targets(self, prefix: str) -> dict[str, Any]:
        """Return the load targets of the weights, by checkpoint name."""
        targets: dict[str, Any] = {**self.qkv.targets(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")}
        targets |= self.output.targets(f"{prefix}.o_proj")
        if self.q_norm is not None:
            targets |= {f"{prefix}.q_norm.weight": self.q_norm, f"{prefix}.k_norm.weight": self.k_norm}
        return targets
