"""The decoder as a few kernels a layer, for decode steps of few rows on CUDA.

Such a step takes as long as the weights need to arrive, and each launch beside them adds to that. Here a layer is
norm and qkv, the attention's own kernels, output and sum, norm and gate and up and their product, down and sum.
"""

import torch
import torch.nn.functional as F

from services.worker.attention.base import RotatingAttentionStep
from services.worker.layers.linear import Linear
from services.worker.layers.triton_skinny import MOST_ROWS, Handed, skinny_norm, skinny_product, skinny_sum
from services.worker.models.decoder import DecoderLayer, DecoderModel


class SkinnyDecoder:
    """Reads the model's weights where they are. Read-only after it is made; its steps can be captured in a graph."""

    most_rows = MOST_ROWS  # with more, the libraries' products are faster

    def __init__(self, model: DecoderModel) -> None:
        if not suits(model):
            raise ValueError("the products must all be of transposed Linear, in bfloat16 or float16, and whole")
        self._model = model

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: RotatingAttentionStep,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What ``DecoderModel.forward`` gives, for up to ``most_rows`` tokens."""
        model = self._model
        x = F.embedding(token_ids, model.embedding)  # type: ignore[arg-type]  # the whole model is here
        last = len(model.layers) - 1
        handed: torch.Tensor | Handed = x
        for index, layer in enumerate(model.layers):
            if index == last:
                x, handed = self._layer(index, layer, x, handed, None, attention, keep)
            else:
                x, handed = self._layer(index, layer, x, handed, model.layers[index + 1], attention, None)
        return skinny_norm(x, model.norm, model.config.norm_eps)  # type: ignore[arg-type]  # as above

    def _layer(
        self,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        handed: torch.Tensor | Handed,
        following: DecoderLayer | None,
        attention: RotatingAttentionStep,
        keep: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | Handed]:
        """``x [tokens, hidden_size]`` after this layer, in place if all are kept, and handed to ``following``.

        ``handed``: ``x`` as this layer's first product takes it.
        """
        own, mlp, eps = layer.attention, layer.mlp, layer.eps
        qkv = skinny_product(handed, own.qkv.weight, own.qkv.bias, norm=(layer.attention_norm, eps))
        attended = attention.run_qkv(index, qkv, own.q_norm, own.k_norm, eps)
        if keep is not None:
            x, attended = x.index_select(0, keep), attended.index_select(0, keep)
        handed = skinny_sum(attended, own.output.weight, own.output.bias, x, layer.mlp_norm)
        norm = (layer.mlp_norm, eps)
        gated = skinny_product(handed, mlp.gate_up.weight, mlp.gate_up.bias, norm=norm, gated=True)
        if following is None:
            return skinny_product(gated, mlp.down.weight, mlp.down.bias, onto=x), x
        return x, skinny_sum(gated, mlp.down.weight, mlp.down.bias, x, following.attention_norm)


def suits(model: DecoderModel) -> bool:
    """Whether ``model`` can run so."""
    linears = (
        linear
        for layer in model.layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    )
    return model.ranks.alone and all(
        isinstance(linear, Linear) and linear.transposed and linear.weight.dtype in (torch.bfloat16, torch.float16)
        for linear in linears
    )
