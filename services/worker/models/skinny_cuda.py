"""The decoder as a few kernels a layer, for decode steps of few rows on CUDA.

Such a step takes as long as the weights need to arrive, and each launch beside them adds to that. Here a layer is
norm and qkv, the attention's own kernels, output and sum, norm and gate and up and their product, down and sum.

Weights in fp8 are multiplied with rows in 16 bits: such a step is closer to the unquantised model than one of more
rows, whose rows are quantised too.
"""

import torch
import torch.nn.functional as F

from services.worker.attention.base import RotatingAttentionStep
from services.worker.layers.fp8 import Fp8Linear
from services.worker.layers.linear import AnyLinear
from services.worker.layers.triton_skinny import MOST_ROWS, Factor, Handed, skinny_norm, skinny_product, skinny_sum
from services.worker.models.decoder import DecoderLayer, DecoderModel

# In fp8, of a model at least so wide: measured on an H200 for Llamas of 1B, which has 2,048, and of 8B.
_MOST_ROWS_FP8 = 8
_WIDE = 4096


class SkinnyDecoder:
    """Reads the model's weights where they are. Read-only after it is made; its steps can be captured in a graph."""

    def __init__(self, model: DecoderModel) -> None:
        if not suits(model):
            raise ValueError("the products must all be of Fp8Linear or transposed Linear in 16 bits, and whole")
        self._model = model
        # With more, the libraries' products are faster.
        self.most_rows = _MOST_ROWS_FP8 if model.quantizes and model.config.hidden_size >= _WIDE else MOST_ROWS

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
        qkv = skinny_product(handed, _factor(own.qkv), norm=(layer.attention_norm, eps))
        attended = attention.run_qkv(index, qkv, own.q_norm, own.k_norm, eps)
        if keep is not None:
            x, attended = x.index_select(0, keep), attended.index_select(0, keep)
        handed = skinny_sum(attended, _factor(own.output), x, layer.mlp_norm)
        norm = (layer.mlp_norm, eps)
        gated = skinny_product(handed, _factor(mlp.gate_up), norm=norm, gated=True)
        if following is None:
            return skinny_product(gated, _factor(mlp.down), onto=x), x
        return x, skinny_sum(gated, _factor(mlp.down), x, following.attention_norm)


def suits(model: DecoderModel) -> bool:
    """Return whether ``model`` can run so."""
    linears = (
        linear
        for layer in model.layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    )
    halves = torch.bfloat16, torch.float16
    return (
        model.ranks.alone
        and model.dtype in halves
        and all(
            isinstance(linear, Fp8Linear) or (linear.transposed and linear.weight.dtype in halves) for linear in linears
        )
    )


def _factor(linear: AnyLinear) -> Factor:
    return Factor(linear.weight, linear.bias, linear.scale[0] if isinstance(linear, Fp8Linear) else None)
