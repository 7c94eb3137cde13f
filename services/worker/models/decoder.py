"""The decoder-only transformer that every architecture here is, over a flattened batch of tokens."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from services.worker.attention.base import AttentionStep, RotatingAttentionStep
from services.worker.described.config import ModelConfig, Windows
from services.worker.described.ranks import ALONE as ONE_RANK
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config
from services.worker.described.slices import slice_targets
from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import AnyLinear, Linear, LinearMaker
from services.worker.layers.rotary import Rotary
from services.worker.models.attention import Attention
from services.worker.models.mlp import Mlp
from services.worker.models.vocabulary import Vocabulary
from services.worker.parallel.exchange import ALONE, Exchange


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give parameters ``dtype`` as they are made. Buffers name a dtype of their own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _norm_weight(config: ModelConfig) -> nn.Parameter:
    return nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before.

    What they give is added to the residual stream by their last product (``adds_in_product``) or by who comes next, so
    that adding and norming are one operator.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: LayerKernels,
        linear: LinearMaker,
        adds_in_product: bool,
        *,
        adds_bias: bool = True,
    ) -> None:
        """``config``: the sizes of this rank's share. ``adds_bias``: one of several ranks adds the biases of the
        products that end on the residual stream."""
        super().__init__()
        self.kernels, self.eps, self.adds_in_product = kernels, config.norm_eps, adds_in_product
        self.attention_norm, self.mlp_norm = _norm_weight(config), _norm_weight(config)
        self.attention = Attention(config, kernels, linear, adds_bias=adds_bias)
        self.mlp = Mlp(config, kernels, linear, adds_bias=adds_bias)
        self.quantizes = self.attention.qkv.quantizes

    def forward(
        self,
        index: int,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None,
        exchange: Exchange,
        tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual stream and what it still lacks after this layer, which is layer ``index`` of this stage.

        ``x [rows, hidden_size]`` holds this rank's rows of ``tokens`` tokens and is changed in place; ``delta``, of the
        same shape, is not yet added to it. ``keep [samples]`` selects the tokens that continue after the attention and
        are returned; None selects all.
        """
        normed = self._normed(x, delta, self.attention_norm)
        attended = self.attention(index, normed, cos, sin, attention, exchange, tokens)
        if keep is not None:
            attended = attended.index_select(0, keep)
        if self.quantizes:
            attended = self.kernels.quantize(attended)
        if keep is None:
            delta = self._add(self.attention.output, attended, x, exchange)
        else:
            x, delta = self._select(self.attention.output, attended, x, keep, exchange, tokens)
            exchange, tokens = exchange.kept, keep.shape[0]
        gated = self.mlp(self._normed(x, delta, self.mlp_norm), exchange, tokens)
        return x, self._add(self.mlp.down, gated, x, exchange)

    def _normed(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | Quantized:
        """As the products that follow take it."""
        if self.quantizes:
            return self.kernels.norm_quantized(x, delta, weight, self.eps)
        return normed(self.kernels, x, delta, weight, self.eps)

    def _add(
        self, last: AnyLinear, values: torch.Tensor | Quantized, x: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor | None:
        """What ``x`` lacks after ``last(values)``."""
        if not self.adds_in_product:
            return exchange.row(values, last)
        last(values, x)
        return None

    def _select(
        self,
        last: AnyLinear,
        values: torch.Tensor | Quantized,
        x: torch.Tensor,
        keep: torch.Tensor,
        exchange: Exchange,
        tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of ``keep``, and what they lack after ``last(values)``, which is of theirs."""
        if not self.adds_in_product:
            return exchange.select(x, keep, tokens, values, last)
        x = x.index_select(0, keep)
        return x, self._add(last, values, x, exchange)

    def targets(self, prefix: str) -> dict[str, Any]:
        """Checkpoint name -> the (view of a) tensor it is copied into."""
        return {
            f"{prefix}.input_layernorm.weight": self.attention_norm,
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm,
            **self.attention.targets(f"{prefix}.self_attn"),
            **self.mlp.targets(f"{prefix}.mlp"),
        }


# Runs the layer that is its first argument on the arguments of ``DecoderLayer.forward``.
RunLayer = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

if TYPE_CHECKING:

    class DecoderLayers(nn.ModuleList):
        """Says what it holds."""

        def __iter__(self) -> Iterator[DecoderLayer]: ...

        def __getitem__(self, index: int) -> DecoderLayer: ...  # type: ignore[override]  # slices, too
else:
    DecoderLayers = nn.ModuleList


class DecoderModel(nn.Module):
    """What one rank has of it. Weights are uninitialised until ``services.worker.models.weights`` fills them; read-only
    afterwards."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels,
        linear: LinearMaker = Linear,
        *,
        adds_in_product: bool = False,
        ranks: Ranks = ONE_RANK,
        layers: range | None = None,
    ) -> None:
        """``config``: of the whole model. ``adds_in_product``: products that end on the residual stream add to it
        themselves, instead of the norm that follows; the same up to rounding, and for one rank only. ``layers``: which
        of the model's this stage has; None = all."""
        super().__init__()
        if adds_in_product and ranks.tp_size > 1:
            raise ValueError("partial sums must be reduced before they meet the residual stream: adds_in_product=False")
        own = layers or range(config.layers)
        self.config, self.kernels, self.ranks, self.dtype, self.device = config, kernels, ranks, dtype, device
        self.local = local_config(config, ranks, len(own))  # sizes of what is here
        self.first, self.last = own.start == 0, own.stop == config.layers
        self.own, self._everywhere = own, frozenset[str]()
        self.windows: Windows = config.windows[own.start : own.stop]
        with torch.device(device), _default_dtype(dtype):
            self.layers = DecoderLayers(
                DecoderLayer(self.local, kernels, linear, adds_in_product, adds_bias=ranks.tp_rank == 0) for _ in own
            )
            self.norm = _norm_weight(config) if self.last else None
            self.quantizes = self.layers[0].quantizes
            self.vocabulary = Vocabulary(config, ranks, linear, self.quantizes, looks_up=self.first, heads=self.last)
        if not ranks.alone:
            with torch.device("meta"):
                whole = DecoderLayer(self.local, kernels, linear, adds_in_product)
            self._everywhere = _checkpoint_names(config, whole.targets(""))
        self.vocabulary.clear_padding()
        self.rotary = Rotary(config.rope, config.head_dim, config.max_context_tokens, dtype, device)
        # ``compile_model`` replaces it: all layers run the same code.
        self.run_layer: RunLayer = DecoderLayer.forward

    @property
    def embedding(self) -> torch.Tensor | None:
        """``[rows of the vocabulary, hidden_size]``; None on a stage that needs none."""
        return self.vocabulary.embedding

    @property
    def head(self) -> AnyLinear | None:
        """The vocabulary head where it is not the embedding."""
        return self.vocabulary.head

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> torch.Tensor:
        """Token ids and ``positions``, ``[tokens]`` int64 -> normed hidden states ``[tokens, hidden_size]``.

        ``keep [samples]`` int32 or int64: the tokens that are sampled from, in any order; only theirs are computed and
        returned then, ``[samples, hidden_size]``, while the keys and values of all are stored.

        Stages behind the first take what the stage before returned as ``inputs``, and change it. Stages before the last
        keep all tokens and return the residual stream: this rank's rows of it, ``[rows, hidden_size]``.
        """
        x, delta = exchange.row(inputs, self.vocabulary.look_up) if self.first else inputs, None
        cos, sin = (None, None) if attention.rotates else self.rotary.at(positions)
        last, tokens = len(self.layers) - 1, positions.shape[0]
        keep = keep if self.last else None
        for index, layer in enumerate(self.layers):
            kept = keep if index == last else None
            x, delta = self.run_layer(layer, index, x, delta, cos, sin, attention, kept, exchange, tokens)
        if not self.last:
            return x if delta is None else x.add_(delta)
        hidden = normed(self.kernels, x, delta, self.norm, self.config.norm_eps)  # type: ignore[arg-type]  # the last stage has one
        return hidden if keep is not None else exchange.complete(hidden, tokens)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` -> logits ``[rows, vocab_size]`` in the model's dtype, the same on all ranks; they
        may be columns of a wider tensor."""
        return self.vocabulary.project(self.kernels.quantize(hidden) if self.quantizes else hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` -> ``[rows, vocab_size]`` float32."""
        return self.project(hidden).float()

    def targets(self) -> dict[str, Any]:
        """Checkpoint name -> what it is copied into (a tensor, a view of one, or something with its ``shape``,
        ``device`` and ``copy_``): exactly what this rank needs of a checkpoint."""
        found: dict[str, Any] = {} if self.norm is None else {"model.norm.weight": self.norm}
        for index, layer in zip(self.own, self.layers, strict=True):
            found |= layer.targets(f"model.layers.{index}")
        return slice_targets(found | self.vocabulary.targets(), self.config, self.ranks)

    def elsewhere(self) -> set[str]:
        """Names of the checkpoint's other tensors: only other ranks need them."""
        return set(self._everywhere - self.targets().keys())


def _checkpoint_names(config: ModelConfig, of_layer: Iterable[str]) -> frozenset[str]:
    """``of_layer``: what stands behind a layer's number."""
    ends = ["model.embed_tokens.weight", "model.norm.weight", *([] if config.tied_embeddings else ["lm_head.weight"])]
    return frozenset([*ends, *(f"model.layers.{index}{name}" for index in range(config.layers) for name in of_layer)])


def normed(
    kernels: LayerKernels, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``x``, after ``delta`` is added to it in place, over its root mean square and times ``weight``."""
    return kernels.norm(x, weight, eps) if delta is None else kernels.add_norm(x, delta, weight, eps)
