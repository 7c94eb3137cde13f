"""A mixture of experts, which replaces the MLP of a layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.described.layer import ExpertsConfig, MlpConfig
from services.worker.layers.block_fp8 import BLOCK, BlockFp8Linear, BlockRows, blocks_of
from services.worker.layers.experts import ExpertWeights, grouped_weights
from services.worker.layers.fp8 import Fp8Linear, Quantized, QuantizedRows
from services.worker.layers.grouped import GroupedLinear, GroupedRows
from services.worker.layers.integers import IntegerLinear, IntegerRows
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import LayerLinears, LinearMaker
from services.worker.models.mlp import Mlp
from services.worker.parallel.exchange import Exchange


class Experts(nn.Module):
    """Router, experts, and the shared expert if there is one.

    As with ``Mlp``, the caller applies ``down``, which here computes the whole mixture. Each rank has some experts, or
    a share of each, and the sum over the ranks is the result. All ranks compute the routes of all tokens.
    """

    # The router needs rows that are not quantized. The products of experts quantize their inputs.
    quantizes = 0
    correction: torch.Tensor | None
    load: torch.Tensor  # [experts] int64
    # [tokens or more, chosen] uint8 or int16, to which each step writes the experts of its tokens; None = not recorded
    chosen_experts: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_matrix: torch.Tensor
    down_matrix_scale: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        features: ExpertsConfig,
        kernels: LayerKernels,
        linears: LayerLinears,
        *,
        adds_bias: bool = True,
    ) -> None:
        """Create uninitialised weights for ``features``, this rank's share of the experts.

        If ``adds_bias`` is false, experts of which this rank has a share have no bias in the last product, because
        another rank adds it. Raises ``ValueError`` if the layers of ``linears`` do not support the sizes.
        """
        super().__init__()
        self.kernels, self.features = kernels, features
        count, width = len(features.local), features.width
        self.router = _parameter(features.count, hidden_size)
        self.router_bias = _parameter(features.count) if features.router.bias else None
        correction = torch.empty(features.count, dtype=torch.float32) if features.router.correction_bias else None
        self.register_buffer("correction", correction)
        # Tokens of each expert since the start, for metrics. Padding counts too.
        self.register_buffer("load", torch.zeros(features.count, dtype=torch.int64), persistent=False)
        self.chosen_experts = None
        adds_bias = adds_bias or features.held is not None
        self.gate_up_bias = _parameter(count, 2 * width) if features.expert_bias else None
        self.down_bias = _parameter(count, hidden_size) if features.expert_bias and adds_bias else None
        for name, inputs, outputs in (("gate_up", hidden_size, [width] * 2), ("down_matrix", width, [hidden_size])):
            matrices, scale = _stacked(linears.experts, count, inputs, outputs)
            self.register_buffer(name, matrices)
            self.register_buffer(f"{name}_scale", scale)
        self.shared = self.shared_gate = None
        if features.shared_width:
            mlp = MlpConfig(activation=features.activation)
            self.shared = Mlp(hidden_size, features.shared_width, mlp, kernels, linears)
            self.shared_gate = _parameter(1, hidden_size) if features.shared_gate else None

    @property
    def weights(self) -> ExpertWeights:
        """The experts of this rank."""
        return ExpertWeights(
            self.gate_up,
            self.down_matrix,
            self.gate_up_bias,
            self.down_bias,
            self.features.local.start,
            self.gate_up_scale,
            self.down_matrix_scale,
        )

    def forward(self, x: torch.Tensor, exchange: Exchange, tokens: int) -> torch.Tensor:
        """Return the input of ``down``: the rows ``[tokens, hidden_size]`` of all tokens.

        ``x [rows, hidden_size]`` are this rank's rows.
        """
        return exchange.complete(x, tokens)

    def down(self, x: torch.Tensor | Quantized, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's part of the result, ``[tokens, hidden_size]``, for ``x [tokens, hidden_size]``.

        If ``onto`` is given, add to it in place and return it.
        """
        if isinstance(x, Quantized):
            raise TypeError("experts take rows that are not quantized")
        features = self.features
        logits = F.linear(x, self.router, self.router_bias)
        routes = self.kernels.route(logits, features.router, features.chosen, self.correction, self.load)
        if self.chosen_experts is not None:
            self.chosen_experts[: routes.experts.shape[0]].copy_(routes.experts)
        result = self.kernels.mix(x, routes, self.weights, features.activation, onto)
        if self.shared is not None:
            result += self._shared(self.shared, x)
        return result

    def _shared(self, shared: Mlp, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the shared expert, of which this rank has a share."""
        inner = shared.inner(self.kernels.quantize(x, shared.quantizes) if shared.quantizes else x)
        result: torch.Tensor = shared.down(shared.activated(inner))
        return result if self.shared_gate is None else result * torch.sigmoid(F.linear(x, self.shared_gate))

    def targets(self, prefix: str) -> dict[str, Any]:
        """Return the load targets of the weights, by the model's names."""
        targets: dict[str, Any] = {f"{prefix}.gate.weight": self.router}
        if self.router_bias is not None:
            targets[f"{prefix}.gate.bias"] = self.router_bias
        if self.correction is not None:
            targets[f"{prefix}.gate.e_score_correction_bias"] = self.correction
        for index, expert in enumerate(self.features.local):
            targets |= self._expert_targets(f"{prefix}.experts.{expert}", index)
        if self.shared is not None:
            targets |= self.shared.targets(f"{prefix}.shared_experts")
        if self.shared_gate is not None:
            targets[f"{prefix}.shared_expert_gate.weight"] = self.shared_gate
        return targets

    def _expert_targets(self, prefix: str, index: int) -> dict[str, Any]:
        width, weights = self.features.width, self.weights
        hidden = self.router.shape[1]
        halves = {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width), "down_proj": slice(0, hidden)}
        targets: dict[str, Any] = {}
        for name, rows in halves.items():
            matrix, bias, scale, inputs = weights.gate_up, weights.gate_up_bias, weights.gate_up_scale, hidden
            if name == "down_proj":
                matrix, bias, scale, inputs = weights.down, weights.down_bias, weights.down_scale, width
            own = None if scale is None else scale[index]
            targets[f"{prefix}.{name}.weight"] = _target(matrix[index], own, rows, inputs)
            if bias is not None:
                targets[f"{prefix}.{name}.bias"] = bias[index][rows]
        return targets


def _stacked(
    linear: LinearMaker, count: int, inputs: int, outputs: list[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return zeros for ``count`` weights as those of ``linear``, and for their scales, as in ``ExpertWeights``.

    Weights in the model's dtype are not initialised.
    """
    with torch.device("meta"):
        one = linear(inputs, outputs, False)
    if isinstance(one, GroupedLinear):
        parts = one.codes, one.scales.expand(1 if one.offsets is None else 2, -1, -1)
    elif isinstance(one, Fp8Linear):
        parts = one.weight, one.scale[0]
    elif isinstance(one, BlockFp8Linear | IntegerLinear):
        parts = one.weight, one.scale
    else:
        return torch.empty(count, sum(outputs), inputs), None
    weight, scale = (torch.zeros(count, *part.shape, dtype=part.dtype) for part in parts)
    return weight, scale


def _target(
    matrix: torch.Tensor, scale: torch.Tensor | None, rows: slice, inputs: int
) -> torch.Tensor | QuantizedRows | BlockRows | GroupedRows | IntegerRows:
    """Return the load target of the outputs ``rows`` of an expert. ``scale`` is that of all its outputs."""
    start, size = rows.start, rows.stop - rows.start
    if scale is None:
        return matrix[rows]
    if scale.dim() == 1:
        return QuantizedRows(matrix[rows], scale[rows].unsqueeze(0))
    if scale.dim() == 2:
        return BlockRows(matrix[rows], scale[start // BLOCK :][: blocks_of(size)])
    if scale.dim() == 3:
        return GroupedRows(grouped_weights(matrix, scale, inputs), start, size)
    return IntegerRows(matrix, scale, start, size)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
