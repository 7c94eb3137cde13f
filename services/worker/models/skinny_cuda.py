"""Decoder with few kernels per layer, for decode steps of few rows on CUDA.

The time of such a step is the time to read the weights plus the cost of each kernel launch. The kernels of a layer are:
norm and qkv; the kernels of the attention; output and sum; norm, gate, up and their product; down and sum. With several
ranks, the exchange comes before each sum, which is then one kernel with the next norm.

Weights in fp8 or of integers are multiplied by rows in 16 bits. With weights in fp8, steps with more rows quantize the
rows too, so their results are less close to the unquantized model.
"""

from functools import partial
from typing import TypeGuard

import torch

from services.worker.attention.base import RotatingAttentionStep
from services.worker.described.layer import AnyValue, SupportedValues, undeclared
from services.worker.layers.block_fp8 import BlockFp8Linear
from services.worker.layers.fp8 import Fp8Linear
from services.worker.layers.grouped import GroupedLinear, GroupedWeights
from services.worker.layers.linear import AnyLinear, Linear
from services.worker.layers.triton_skinny import (
    MOST_ROWS,
    LinearWeights,
    NormInput,
    skinny_norm,
    skinny_product,
    skinny_sum,
)
from services.worker.models.base import RankModel
from services.worker.models.decoder import DecoderLayer, DecoderModel
from services.worker.parallel.exchange import ALONE, Exchange

# Row limit with several ranks, whose products are smaller. With two H200 and the 8B shape, the time per token was 15 %
# less for one stream and 4 % less for 8.
_MOST_ROWS_OF_RANK = 8

# The layers that ``SkinnyDecoder`` computes. The attention backend applies norms of heads, and all rules of scores.
SUPPORTED: SupportedValues = {
    "qk_norm": ("none", "per_head"),
    "window": AnyValue(),
    "scale": AnyValue(),
    "soft_cap": AnyValue(),
    "sinks": (False, True),
    "rope": AnyValue(),
    "qkv_bias": (False, True),
    "output_bias": (False, True),
    "mlp_bias": (False, True),
}


class SkinnyDecoder:
    """Decoder for few rows that uses the weights of ``model`` in place.

    It is read-only after construction. CUDA graphs can capture its steps. Raises ``ValueError`` if ``supports(model)``
    is false.
    """

    def __init__(self, model: DecoderModel) -> None:
        if not supports(model):
            raise ValueError(
                "all products must be of Fp8Linear, BlockFp8Linear, GroupedLinear or transposed Linear, in 16 bits and"
                " in one stage, and all features of the layers must be in SUPPORTED; use the model itself"
            )
        self._model = model
        self.most_rows = MOST_ROWS if model.ranks.tp_size == 1 else _MOST_ROWS_OF_RANK

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: RotatingAttentionStep,
        keep: torch.Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> torch.Tensor:
        """Return the result of ``DecoderModel.forward`` for at most ``most_rows`` tokens.

        ``exchange`` must leave all rows on every rank.
        """
        model = self._model
        x = exchange.row(token_ids, model.vocabulary.embed)
        if model.ranks.tp_size > 1:
            return self._run_share(x, attention, keep, exchange)
        last = len(model.layers) - 1
        first_input: torch.Tensor | NormInput = x
        for index, layer in enumerate(model.layers):
            if index == last:
                x, first_input = self._layer(index, layer, x, first_input, None, attention, keep)
            else:
                x, first_input = self._layer(index, layer, x, first_input, model.layers[index + 1], attention, None)
        return skinny_norm(x, model.norm, model.config.norm_eps)  # type: ignore[arg-type]  # the only stage is the last

    def _run_share(
        self, x: torch.Tensor, attention: RotatingAttentionStep, keep: torch.Tensor | None, exchange: Exchange
    ) -> torch.Tensor:
        """Return the result of ``__call__`` from the embeddings ``x``, with this rank's share of the products.

        ``x`` is changed in place.
        """
        model, eps, delta = self._model, self._model.config.norm_eps, None
        for index, layer in enumerate(model.layers):
            weights, mlp = layer.attention, layer.dense_mlp
            attention_norm, mlp_norm = layer.input_norms
            qkv = skinny_product(model.kernels.norm(x, attention_norm, eps, delta), as_weights(weights.qkv))
            attended = attention.run_qkv(index, qkv, weights.norms)
            if keep is not None and index == len(model.layers) - 1:
                x, attended = x.index_select(0, keep), attended.index_select(0, keep)
            delta = exchange.row(attended, partial(skinny_product, linear=as_weights(weights.output)))
            gated = skinny_product(model.kernels.norm(x, mlp_norm, eps, delta), as_weights(mlp.inner), gated=True)
            delta = exchange.row(gated, partial(skinny_product, linear=as_weights(mlp.down)))
        return model.kernels.norm(x, model.norm, eps, delta)  # type: ignore[arg-type]  # the only stage is the last

    def _layer(
        self,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        first_input: torch.Tensor | NormInput,
        next_layer: DecoderLayer | None,
        attention: RotatingAttentionStep,
        keep: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | NormInput]:
        """Return ``x [tokens, hidden_size]`` after this layer, and the input of the next layer's first product.

        ``x`` is updated in place if ``keep`` is None. ``first_input`` is the input of this layer's first product.
        """
        weights, mlp, eps = layer.attention, layer.dense_mlp, layer.eps
        attention_norm, mlp_norm = layer.input_norms
        qkv = skinny_product(first_input, as_weights(weights.qkv), norm=(attention_norm, eps))
        attended = attention.run_qkv(index, qkv, weights.norms)
        if keep is not None:
            x, attended = x.index_select(0, keep), attended.index_select(0, keep)
        mlp_input = skinny_sum(attended, as_weights(weights.output), x, mlp_norm)
        norm = (mlp_norm, eps)
        gated = skinny_product(mlp_input, as_weights(mlp.inner), norm=norm, gated=True)
        if next_layer is None:
            return skinny_product(gated, as_weights(mlp.down), onto=x), x
        return x, skinny_sum(gated, as_weights(mlp.down), x, next_layer.input_norms[0])


def supports(model: RankModel) -> TypeGuard[DecoderModel]:
    """Return whether ``SkinnyDecoder`` can run ``model``."""
    if not isinstance(model, DecoderModel):
        return False
    linears = (
        linear
        for layer in model.layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.dense_mlp.inner, layer.dense_mlp.down)
    )
    return (
        model.ranks.pp_size == 1
        and model.dtype in (torch.bfloat16, torch.float16)
        and not any(undeclared(layer, SUPPORTED) for layer in model.local.layers)
        and all(_supported(linear) for linear in linears)
    )


def _supported(linear: AnyLinear) -> bool:
    if isinstance(linear, GroupedLinear):
        return linear.order is None
    if isinstance(linear, Linear):
        return linear.transposed and linear.weight.dtype in (torch.bfloat16, torch.float16)
    return isinstance(linear, Fp8Linear | BlockFp8Linear)


def as_weights(linear: AnyLinear) -> LinearWeights | GroupedWeights:
    """Return the tensors of ``linear``, of a model that is supported, for ``skinny_product``."""
    if isinstance(linear, GroupedLinear):
        return GroupedWeights.of(linear)
    if isinstance(linear, BlockFp8Linear):
        return LinearWeights(linear.weight, linear.bias, linear.scale)
    return LinearWeights(linear.weight, linear.bias, linear.scale[0] if isinstance(linear, Fp8Linear) else None)
