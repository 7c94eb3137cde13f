"""Decoder-only transformer over a flattened batch of tokens, for all supported architectures."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from services.worker.attention.base import AttentionStep, LayerAttention, RotatingAttentionStep
from services.worker.attention.compiled import FIRST_LAYER
from services.worker.described.checkpoint import norm_names
from services.worker.described.config import ModelConfig, Windows
from services.worker.described.forms import MATRICES
from services.worker.described.layer import AnyValue, ExpertsConfig, LayerConfig, SupportedValues, undeclared
from services.worker.described.ranks import ALONE as ONE_RANK
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config
from services.worker.layers.fp8 import Quantized
from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.integers import IntegerLinear
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import AnyLinear, LayerLinears, Linear, LinearMaker
from services.worker.layers.panels import PanelLinear
from services.worker.layers.rotary import Rotary
from services.worker.models.attention import Attention
from services.worker.models.base import Compile, RankModel
from services.worker.models.experts import Experts
from services.worker.models.load_targets import load_targets
from services.worker.models.mlp import Mlp
from services.worker.models.vocabulary import VocabularyLayers
from services.worker.parallel.exchange import ALONE, Exchange

# The layers that ``DecoderLayer`` computes with the plain operators. Every feature must be declared here.
SUPPORTED: SupportedValues = {
    "norm_placement": ("before", "after", "both"),
    "qk_norm": ("none", "per_head", "whole"),
    "rope": AnyValue(),
    "window": AnyValue(),
    "scale": AnyValue(),
    "soft_cap": AnyValue(),
    "sinks": (False, True),
    "qkv_bias": (False, True),
    "output_bias": (False, True),
    "kind": ("gated", "plain"),
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped_swiglu"),
    "mlp_bias": (False, True),
    "mlp": AnyValue(),  # a mixture of experts
}


# The last product of attention or MLP. The second argument, if it is given, is a tensor to add to in place.
Product = Callable[..., torch.Tensor]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters with ``dtype`` inside the context. Buffers set their own dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _norm_weight(config: ModelConfig) -> nn.Parameter:
    return nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)


class DecoderLayer(nn.Module):
    """The plain implementation of a layer: attention and MLP, with norms before them, after them, or both.

    It works on all devices, for any number of tokens and ranks, and with torch.compile. Other implementations must give
    the same results, and are used only for layers whose features they declare.

    With ``adds_in_product``, the last product of each part adds to the residual stream, if no norm follows. Otherwise
    the following norm adds the part's output and normalises the sum in one operator.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        kernels: LayerKernels,
        linears: LayerLinears,
        adds_in_product: bool,
        *,
        adds_bias: bool = True,
    ) -> None:
        """Create uninitialised weights for ``layer`` of ``config``, this rank's share of the model.

        If ``adds_bias`` is false, the last product of each part has no bias, because another rank adds it. Raises
        ``ValueError`` if the plain implementation does not support ``layer``.
        """
        super().__init__()
        if missing := undeclared(layer, SUPPORTED):
            raise ValueError(f"{layer}: no implementation of {', '.join(missing)}; add it to models/decoder.py")
        self.kernels, self.eps, self.description = kernels, config.norm_eps, layer
        before, after = layer.norm_placement != "after", layer.norm_placement != "before"
        self.attention_norm = _norm_weight(config) if before else None
        self.attention_output_norm = _norm_weight(config) if after else None
        self.mlp_norm = _norm_weight(config) if before else None
        self.mlp_output_norm = _norm_weight(config) if after else None
        self.adds_in_product = adds_in_product and not after
        self.attention = Attention(config, layer.attention, kernels, linears, adds_bias=adds_bias)
        self.quantizes = self.attention.qkv.quantizes
        self.mlp: Mlp | Experts
        if isinstance(layer.mlp, ExpertsConfig):
            self.mlp = Experts(config.hidden_size, layer.mlp, kernels, linears, adds_bias=adds_bias)
        else:
            width = config.intermediate_size
            self.mlp = Mlp(config.hidden_size, width, layer.mlp, kernels, linears, adds_bias=adds_bias)

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
        """Run layer ``index`` of this stage. Return the residual stream and the delta that is not yet added to it.

        ``x [rows, hidden_size]`` holds this rank's rows of ``tokens`` tokens and is changed in place. ``delta`` has the
        same shape and is not yet added to ``x``; None means zero. ``keep [samples]`` selects the tokens that continue
        after the attention; None selects all.
        """
        normed = self._input(x, delta, self.attention_norm, self.quantizes)
        attended = self.attention(index, normed, cos, sin, attention, exchange, tokens)
        if keep is not None:
            attended = attended.index_select(0, keep)
        if quantizes := self.attention.output.quantizes:
            attended = self.kernels.quantize(attended, quantizes)
        if keep is None:
            delta = self._output(self.attention.output, attended, x, exchange, self.attention_output_norm)
        else:
            x, delta = self._select(self.attention.output, attended, x, keep, exchange, tokens)
            exchange, tokens = exchange.kept, keep.shape[0]
        normed = self._input(x, delta, self.mlp_norm, self.mlp.quantizes)
        inner = self.mlp(normed, exchange, tokens)
        return x, self._output(self.mlp.down, inner, x, exchange, self.mlp_output_norm)

    def _input(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, quantizes: int
    ) -> torch.Tensor | Quantized:
        """Return ``x + delta``, normalised if ``weight`` is given, and quantized if ``quantizes``, as in ``Linear``.

        ``delta`` is added to ``x`` in place.
        """
        if weight is None:
            if delta is not None:
                x += delta
            return self.kernels.quantize(x, quantizes) if quantizes else x
        if quantizes:
            return self.kernels.norm_quantized(x, delta, weight, self.eps, quantizes)
        return self.kernels.norm(x, weight, self.eps, delta)

    def _output(
        self,
        last: Product,
        values: torch.Tensor | Quantized,
        x: torch.Tensor,
        exchange: Exchange,
        weight: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Add ``last(values)`` to ``x`` in place, or return it as the delta of ``x``.

        The delta is normalised if ``weight`` is given.
        """
        if self.adds_in_product:
            last(values, x)
            return None
        delta = exchange.row(values, last)
        return delta if weight is None else self.kernels.norm(delta, weight, self.eps)

    def _select(
        self,
        last: Product,
        values: torch.Tensor | Quantized,
        x: torch.Tensor,
        keep: torch.Tensor,
        exchange: Exchange,
        tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows ``keep`` of ``x``, and their delta from ``last(values)``. ``values`` has only these rows."""
        weight = self.attention_output_norm
        if weight is None and not self.adds_in_product:
            return exchange.select(x, keep, tokens, values, last)
        x = exchange.selected(x, keep, tokens)
        return x, self._output(last, values, x, exchange.kept, weight)

    @property
    def dense_mlp(self) -> Mlp:
        """MLP of a layer without experts. Raises ``TypeError`` for other layers."""
        if not isinstance(self.mlp, Mlp):
            raise TypeError("the layer has experts; look at its description first")
        return self.mlp

    @property
    def input_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms before attention and MLP. Raises ``TypeError`` for a layer without them."""
        if self.attention_norm is None or self.mlp_norm is None:
            raise TypeError("the layer has no norms before its parts; look at its description first")
        return self.attention_norm, self.mlp_norm

    def targets(self, prefix: str) -> dict[str, Any]:
        """Return the load targets of the weights, by the model's names."""
        norms = (self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm)
        weights = (weight for weight in norms if weight is not None)
        return {
            **{f"{prefix}.{name}": weight for name, weight in zip(norm_names(self.description), weights, strict=True)},
            **self.attention.targets(f"{prefix}.self_attn"),
            **self.mlp.targets(f"{prefix}.mlp"),
        }


# Runs the layer that is its first argument on the arguments of ``DecoderLayer.forward``.
RunLayer = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class DecoderModel(RankModel):
    """The share of a model that a rank holds. ``models.weights`` fills the weights, which are then read-only."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels,
        linear: LinearMaker = Linear,
        makers: Sequence[LayerLinears] | None = None,
        *,
        adds_in_product: bool = False,
        ranks: Ranks = ONE_RANK,
        layers: range | None = None,
    ) -> None:
        """Create uninitialised weights for a rank of the model that ``config`` describes.

        ``adds_in_product`` is as in ``DecoderLayer``. It changes results by rounding only, and needs ``tp_size`` 1.
        ``layers`` are the layers of this stage; None means all. ``makers`` has the constructors of the linear layers of
        each; None means ``linear``, which makes the head. Raises ``ValueError``.
        """
        super().__init__()
        if adds_in_product and ranks.tp_size > 1:
            raise ValueError(
                "adds_in_product=True needs tp_size=1, since ranks reduce sums first; use adds_in_product=False"
            )
        stage = layers or range(len(config.layers))
        self.config, self.kernels, self.ranks, self.dtype, self.device = config, kernels, ranks, dtype, device
        self.local = local_config(config, ranks, stage)  # this rank's share
        self.first, self.last = stage.start == 0, stage.stop == len(config.layers)
        self.layer_range = stage
        self.windows: Windows = self.local.windows
        with torch.device(device), _default_dtype(dtype):
            modules = (
                DecoderLayer(self.local, layer, kernels, maker, adds_in_product, adds_bias=ranks.tp_rank == 0)
                for layer, maker in zip(
                    self.local.layers, makers or [LayerLinears(*[linear] * len(MATRICES))] * len(stage), strict=True
                )
            )
            self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(modules))
            self.norm = _norm_weight(config) if self.last else None
            self.quantizes = any(getattr(each, "quantizes", 0) for layer in self.layers for each in layer.modules())
            qkv = self.layers[0].attention.qkv
            narrows = makers is None and qkv.narrows
            head = linear
            for kind in (IntegerLinear, GroupedLinear):
                if narrows and isinstance(qkv, kind):
                    head = partial(kind, bits=8)  # one of 4 bits would cost about as much precision as the layers
            self.vocabulary = VocabularyLayers(
                config, ranks, kernels, head, narrows, self._panel_dtype, has_embedding=self.first, has_head=self.last
            )
        self.vocabulary.clear_padding()
        self.rotaries: list[Rotary] = [
            Rotary(rope, config.rotated_dim, config.max_context_tokens, dtype, device, head_dim=config.head_dim)
            for rope in config.ropes
        ]
        # ``compile_layers`` replaces this function.
        self.run_layer: RunLayer = DecoderLayer.forward

    @property
    def _panel_dtype(self) -> torch.dtype | None:
        """Dtype of the weights if the linear layers have them in panels, or None."""
        first = self.layers[0].attention.qkv
        return first.weight.dtype if isinstance(first, PanelLinear) else None

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in the cache: that of the weights, if activations are wider."""
        return self._panel_dtype or self.dtype

    @property
    def embedding(self) -> torch.Tensor | None:
        """Embedding ``[vocabulary rows, hidden_size]``, or None if the stage does not need it or the head has it."""
        return self.vocabulary.embedding

    @property
    def head(self) -> AnyLinear | None:
        """Vocabulary head, or None if the embedding is used instead or the stage has no head."""
        return self.vocabulary.head

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> torch.Tensor:
        x, delta = exchange.row(inputs, self.vocabulary.embed) if self.first else inputs, None
        unrotated = None, None
        tables = [unrotated if attention.rotates else rotary.at(positions) for rotary in self.rotaries]
        last, tokens = len(self.layers) - 1, positions.shape[0]
        keep = keep if self.last else None
        for index, layer in enumerate(self.layers):
            kept, rope = keep if index == last else None, layer.description.attention.rope
            cos, sin = unrotated if rope is None else tables[rope]
            x, delta = self.run_layer(layer, index, x, delta, cos, sin, attention, kept, exchange, tokens)
        if not self.last:
            return x if delta is None else x.add_(delta)
        hidden = self.kernels.norm(x, self.norm, self.config.norm_eps, delta)  # type: ignore[arg-type]  # set on the last stage
        return hidden if keep is not None else exchange.complete(hidden, tokens)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        quantizes = self.head.quantizes if self.head is not None else 0
        return self.vocabulary.project(self.kernels.quantize(hidden, quantizes) if quantizes else hidden)

    def compile_layers(self, compiled: Compile) -> None:
        run = compiled(DecoderLayer.forward, 0)
        # All layers run the same code.
        self.run_layer = lambda layer, index, *arguments: run(layer, index + FIRST_LAYER, *arguments)

    def attention_layers(self) -> list[LayerAttention]:
        return [layer.attention.rules for layer in self.layers]

    def targets(self) -> dict[str, Any]:
        """Return the load targets of all checkpoint tensors that this rank needs, by name; see ``LoadTarget``."""
        targets: dict[str, Any] = {} if self.norm is None else {"model.norm.weight": self.norm}
        for index, layer in zip(self.layer_range, self.layers, strict=True):
            targets |= layer.targets(f"model.layers.{index}")
        return load_targets(targets | self.vocabulary.targets(), self.config, self.ranks)
