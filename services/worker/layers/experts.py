"""A mixture of experts in plain torch, for all devices and dtypes: the reference for all other implementations."""

from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F

from services.worker.described.layer import Activation, RouterConfig
from services.worker.described.memory import INTEGER_GROUP
from services.worker.layers.activations import gated
from services.worker.layers.block_fp8 import expand_blocks
from services.worker.layers.grouped import GroupedWeights
from services.worker.layers.operators import operator

# Added to the sum of sigmoids before weights are divided by it, as in transformers.
LEAST_SUM = 1e-20


class ExpertWeights(NamedTuple):
    """The experts of a rank. ``width`` is the intermediate size of an expert, or the rank's share of it."""

    gate_up: torch.Tensor  # [experts, 2 * width, hidden_size], the rows of gate, then those of up
    down: torch.Tensor  # [experts, hidden_size, width]
    gate_up_bias: torch.Tensor | None  # [experts, 2 * width]
    down_bias: torch.Tensor | None  # [experts, hidden_size]
    first: int = 0  # number of the rank's first expert
    # If the weights are in fp8: float32 scales of rows, [experts, rows], or of blocks of 128 x 128, [experts, row
    # blocks, column blocks]. The rows of gate and those of up are whole blocks. If the weights are integers on CPUs,
    # both are as in ``IntegerLinear``, with a first dimension of experts. If they are integers on GPUs, or in MXFP4,
    # matrices are codes of ``GroupedWeights``, and these are its scales and offsets, [experts, 1 or 2, groups, rows].
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None


class Routes(NamedTuple):
    """The experts of each token. They are in the order of their scores."""

    experts: torch.Tensor  # [tokens, chosen] int32, counted over all ranks
    weights: torch.Tensor  # [tokens, chosen] float32


def route(logits: torch.Tensor, router: RouterConfig, chosen: int, correction: torch.Tensor | None) -> Routes:
    """Return the ``chosen`` experts of each token. Of equal scores, the expert with the lower number comes first.

    ``logits [tokens, experts]`` are of any dtype. ``correction [experts]`` float32 is given if the router has a
    correction bias.
    """
    logits = logits.float()
    if router.scores == "softmax_of_chosen":
        values, experts = _top(logits, chosen)
        return Routes(experts.int(), F.softmax(values, dim=-1) * router.scale)
    scores = logits.sigmoid() if router.scores == "sigmoid" else F.softmax(logits, dim=-1)
    ranked = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = ranked.unflatten(1, (router.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        groups = _top(best, router.chosen_groups)[1]
        considered = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        ranked = grouped.masked_fill(~considered.unsqueeze(-1), -torch.inf).flatten(1)
    experts = _top(ranked, chosen)[1]
    weights = scores.gather(1, experts)
    if router.normalized:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + LEAST_SUM if router.scores == "sigmoid" else total)
    return Routes(experts.int(), weights * router.scale)


def mix(x: torch.Tensor, routes: Routes, weights: ExpertWeights, activation: Activation) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts, ``[tokens, hidden_size]`` of the dtype of ``x``.

    ``x`` is ``[tokens, hidden_size]``. Experts of other ranks are left out. Sums are in float32.
    """
    mixed: torch.Tensor = torch.ops.tokasaurus.mix_experts_plain(x, *routes, *weights, activation)
    return mixed


@operator(
    "mix_experts_plain(Tensor x, Tensor experts, Tensor routed, Tensor gate_up, Tensor down, Tensor? gate_up_bias,"
    " Tensor? down_bias, int first, Tensor? gate_up_scale, Tensor? down_scale, str activation) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
)
def _mix(x: torch.Tensor, experts: torch.Tensor, routed: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Compute ``mix``. This is a custom operator, because the number of tokens of an expert depends on data."""
    *fields, activation = arguments
    routes, weights = Routes(experts, routed), ExpertWeights(*fields)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    width = _width(weights)
    for index in range(weights.gate_up.shape[0]):
        tokens, choices = torch.where(routes.experts == weights.first + index)
        if not len(tokens):
            continue
        rows = _product(x[tokens], weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, index, 2 * width)
        rows = gated(rows, activation)
        rows = _product(rows, weights.down, weights.down_scale, weights.down_bias, index, x.shape[1])
        total.index_add_(0, tokens, rows.float() * routes.weights[tokens, choices].unsqueeze(1))
    return total.to(x.dtype)


def has_blocks(scales: torch.Tensor | None) -> bool:
    """Return whether ``scales`` of ``ExpertWeights`` are those of blocks."""
    return scales is not None and scales.dim() == 3


def has_groups(scales: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether ``scales`` of ``ExpertWeights`` are those of ``GroupedWeights``."""
    return scales is not None and scales.dim() == 4


def grouped_weights(codes: torch.Tensor, scales: torch.Tensor, inputs: int) -> GroupedWeights:
    """Return the weights of an expert with ``inputs``. ``codes`` and ``scales`` are those of ``ExpertWeights``."""
    offsets = scales[1] if len(scales) > 1 else None
    return GroupedWeights(codes, scales[0], offsets, None, 8 * codes.shape[1] // inputs)


def _top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest scores of each row and their indices, descending. Equal scores keep their order."""
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], indices[:, :count]


def _in_panels(scales: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether ``scales`` of ``ExpertWeights`` are those of ``IntegerLinear``."""
    return scales is not None and scales.dim() == 5


def _width(weights: ExpertWeights) -> int:
    """Return the number of inputs of the last product of an expert."""
    if _in_panels(weights.down_scale):
        return weights.down_scale.shape[2] * INTEGER_GROUP
    return weights.gate_up.shape[1] // 2


def _product(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    index: int,
    outputs: int,
) -> torch.Tensor:
    """Return the product of ``rows`` with the matrix of expert ``index``, which has ``outputs`` rows.

    A matrix in fp8 or in groups is converted first.
    """
    matrix = matrices[index]
    if _in_panels(scales):
        product: torch.Tensor = torch.ops.tokasaurus.integer_product(rows, matrix, scales[index], outputs)
        return product if biases is None else product + biases[index]
    if has_groups(scales):
        matrix = grouped_weights(matrix, scales[index], rows.shape[1]).dequantized().to(rows.dtype)
    elif scales is not None:
        own = scales[index]
        factors = expand_blocks(own, *matrix.shape) if has_blocks(scales) else own.unsqueeze(1)
        matrix = (matrix.float() * factors).to(rows.dtype)
    return F.linear(rows, matrix, None if biases is None else biases[index])
