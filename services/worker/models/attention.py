"""Self-attention of one layer: projections and rotation. The attention backend computes scores and stores the cache."""

from typing import Any

import torch
from torch import nn

from services.worker.attention.base import AttentionStep, HeadNorms, LayerAttention, RotatingAttentionStep
from services.worker.described.config import ModelConfig
from services.worker.described.layer import AttentionConfig
from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import LayerLinears
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
        linears: LayerLinears,
        *,
        adds_bias: bool = True,
    ) -> None:
        """Create uninitialised weights for ``config``, this rank's share of the model, and ``features``.

        If ``adds_bias`` is false, ``output`` has no bias, because another rank adds it.
        """
        super().__init__()
        self.kernels, self.features = kernels, features
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = linears.qkv(config.hidden_size, widths, features.qkv_bias)
        self.output = linears.output(widths[0], config.hidden_size, features.output_bias and adds_bias)
        # A norm over padded heads divides by too many elements. Its weights are scaled accordingly while loading.
        self.eps = config.norm_eps * config.stored_head_dim / config.head_dim
        self.q_norm = self.k_norm = self.sinks = None
        self._whole_norms: tuple[torch.Tensor, ...] = ()
        if features.qk_norm != "none":
            sizes = (self.head_dim, self.head_dim) if features.qk_norm == "per_head" else widths[:2]
            self.q_norm, self.k_norm = (nn.Parameter(torch.empty(size), requires_grad=False) for size in sizes)
            self._whole_norms = self.q_norm, self.k_norm
        if features.sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
        scale = config.stored_head_dim**-0.5 if features.scale is None else features.scale
        self.rules = LayerAttention(scale, features.window, features.soft_cap, self.sinks, features.rope)

    @property
    def norms(self) -> HeadNorms | None:
        """The norms of each head of queries and keys, or None if heads are not normalised one by one."""
        queries, keys = self.q_norm, self.k_norm
        if queries is None or keys is None or self.features.qk_norm != "per_head":
            return None
        return HeadNorms(queries, keys, self.eps)

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
        ``attention`` rotates queries and keys itself, or the layer does not rotate them.
        """
        projected = exchange.column(x, self.qkv, tokens)
        if self.features.qk_norm == "whole":
            self._norm_whole(projected, exchange)
        if attention.rotates:
            return attention.run_qkv(index, projected, self.norms)
        kernels, norms = self.kernels, self.norms
        heads = projected.view(projected.shape[0], -1, self.head_dim)
        rotated, values = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if norms is not None:
            queries, keys = rotated.split((self.heads, self.kv_heads), dim=1)
            normed = kernels.norm(queries, norms.queries, norms.eps), kernels.norm(keys, norms.keys, norms.eps)
            rotated = torch.cat(normed, dim=1)
        if cos is not None and sin is not None:
            rotated = kernels.rotate(rotated, cos, sin)
        queries, keys = rotated.split((self.heads, self.kv_heads), dim=1)
        return attention.run(index, queries, keys, values)

    def _norm_whole(self, projected: torch.Tensor, exchange: Exchange) -> None:
        """Normalise all heads of q together, and all of k, in place in ``projected``.

        Heads may be on several ranks. If ranks have copies of key heads, the sum and the number of elements count each
        head equally often, so the mean is that of the heads.
        """
        widths = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = projected[:, : sum(widths)].split(widths, dim=1)
        squares = torch.stack([part.float().square().sum(dim=-1) for part in parts], dim=1)
        squares, ranks = exchange.total(squares), exchange.size
        for part, sums, weight in zip(parts, squares.unbind(dim=1), self._whole_norms, strict=True):
            factors = torch.rsqrt(sums / (part.shape[1] * ranks) + self.eps).unsqueeze(1)
            part.copy_(part.float() * factors * weight)

    def targets(self, prefix: str) -> dict[str, Any]:
        """Return the load targets of the weights, by the model's names."""
        targets: dict[str, Any] = {**self.qkv.targets(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")}
        targets |= self.output.targets(f"{prefix}.o_proj")
        if self.q_norm is not None:
            targets |= {f"{prefix}.q_norm.weight": self.q_norm, f"{prefix}.k_norm.weight": self.k_norm}
        if self.sinks is not None:
            targets[f"{prefix}.sinks"] = self.sinks
        return targets
