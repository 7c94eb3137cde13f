"""The decoder-only transformer that every architecture here is, over a flattened batch of tokens."""

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.attention.base import AttentionStep, RotatingAttentionStep
from services.worker.layers.attention import Attention
from services.worker.layers.fp8 import Copies, Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import Linear, LinearMaker
from services.worker.layers.mlp import Mlp
from services.worker.layers.rotary import Rotary
from services.worker.models.config import ModelConfig


def _norm_weight(config: ModelConfig) -> nn.Parameter:
    return nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before.

    What they give is added to the residual stream by their last product (``adds_in_product``) or by who comes next, so
    that adding and norming are one operator.
    """

    def __init__(
        self, config: ModelConfig, index: int, kernels: LayerKernels, linear: LinearMaker, adds_in_product: bool
    ) -> None:
        super().__init__()
        self.kernels, self.eps, self.adds_in_product = kernels, config.norm_eps, adds_in_product
        self.attention_norm, self.mlp_norm = _norm_weight(config), _norm_weight(config)
        self.attention = Attention(config, index, kernels, linear)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, config.mlp_bias, kernels, linear)
        self.quantizes = self.attention.qkv.quantizes

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``x [tokens, hidden_size]``, changed in place, lacks ``delta``; returns both as they are after this layer.

        ``keep [samples]``: the rows that go on after the attention and are returned; None is all.
        """
        attended = self.attention(self._normed(x, delta, self.attention_norm), cos, sin, attention)
        if keep is not None:
            x, attended = x.index_select(0, keep), attended.index_select(0, keep)
        if self.quantizes:
            attended = self.kernels.quantize(attended)
        delta = self._add(self.attention.output, attended, x)
        return x, self._add(self.mlp, self._normed(x, delta, self.mlp_norm), x)

    def _normed(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | Quantized:
        """As the products that follow take it."""
        if self.quantizes:
            return self.kernels.norm_quantized(x, delta, weight, self.eps)
        return normed(self.kernels, x, delta, weight, self.eps)

    def _add(self, last: nn.Module, values: torch.Tensor | Quantized, x: torch.Tensor) -> torch.Tensor | None:
        """What ``x`` lacks after ``last(values)``."""
        if not self.adds_in_product:
            return last(values)
        last(values, x)
        return None

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the (view of a) tensor it is copied into."""
        return {
            f"{prefix}.input_layernorm.weight": self.attention_norm,
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm,
            **self.attention.targets(f"{prefix}.self_attn"),
            **self.mlp.targets(f"{prefix}.mlp"),
        }


class DecoderModel(nn.Module):
    """Weights are uninitialised until ``services.worker.weights`` fills them; read-only afterwards."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels,
        linear: LinearMaker = Linear,
        *,
        adds_in_product: bool = False,
    ) -> None:
        """``adds_in_product``: products that end on the residual stream add to it themselves, instead of the norm
        that follows; the same up to rounding."""
        super().__init__()
        self.config, self.kernels = config, kernels
        with torch.device("meta"):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
            self.layers = nn.ModuleList(
                DecoderLayer(config, index, kernels, linear, adds_in_product) for index in range(config.layers)
            )
            self.norm = _norm_weight(config)
            # A quantised head is a copy of the embedding even where the two are one: rows are looked up as they are.
            self.quantizes = self.layers[0].quantizes
            separate = self.quantizes or not config.tied_embeddings
            self.head = linear(config.hidden_size, config.vocab_size, False) if separate else None
        for parameter in self.parameters():  # buffers have a dtype of their own
            parameter.data = parameter.data.to(dtype)
        self.to_empty(device=device)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_context_tokens, dtype, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``token_ids`` and ``positions [tokens]`` int64 -> normed hidden states ``[tokens, hidden_size]``.

        ``keep [samples]`` int32 or int64: the tokens that are sampled from, in any order; only theirs are computed and
        returned then, ``[samples, hidden_size]``, while the keys and values of all are stored.
        """
        x, delta = F.embedding(token_ids, self.embedding), None
        cos, sin = (None, None) if attention.rotates else self.rotary.at(positions)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x, delta = layer(x, delta, cos, sin, attention, keep if index == last else None)
        return normed(self.kernels, x, delta, self.norm, self.config.norm_eps)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` -> logits ``[rows, vocab_size]`` in the model's dtype."""
        if self.head is None:
            return F.linear(hidden, self.embedding)
        return self.head(self.kernels.quantize(hidden) if self.quantizes else hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` -> ``[rows, vocab_size]`` float32."""
        return self.project(hidden).float()

    def targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> what it is copied into (a tensor, a view of one, or something with its ``shape``,
        ``device`` and ``copy_``): exactly what a checkpoint must hold."""
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for index, layer in enumerate(self.layers):
            found |= layer.targets(f"model.layers.{index}")
        if self.head is not None:
            head = self.head.targets("lm_head")
            if self.config.tied_embeddings:
                head = {"model.embed_tokens.weight": Copies(self.embedding, *head.values())}
            found |= head
        return found


def normed(
    kernels: LayerKernels, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``x``, after ``delta`` is added to it in place, over its root mean square and times ``weight``."""
    return kernels.norm(x, weight, eps) if delta is None else kernels.add_norm(x, delta, weight, eps)
