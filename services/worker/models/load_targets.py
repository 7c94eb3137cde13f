"""Load targets: the destinations of a checkpoint's tensors, which may be stored in another form or in part."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from services.common.model.quantized.scheme import Scheme
from services.worker.described.checkpoint import NORMS, checkpoint_tensors
from services.worker.described.config import ModelConfig
from services.worker.described.heads import query_order, value_order
from services.worker.described.naming import CheckpointTensor, Part
from services.worker.described.ranks import Ranks
from services.worker.described.shares import RankShare, evenly, kv_heads_of, vocabulary_of
from services.worker.layers.fp8 import copy_rows
from services.worker.layers.quantized_weight import QuantizedWeight, keeps

Conversion: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_NORMS = {norm for names in NORMS.values() for norm in names} | {"norm", "q_norm", "k_norm"}


class SliceTarget:
    """A load target for a tensor of which ``target`` holds ``share`` of ``dimension``.

    ``shape`` and ``device`` are those of a tensor that holds all of it. Raises ``ValueError`` if the size of ``target``
    does not match ``share``.
    """

    def __init__(self, target: Any, dimension: int, share: RankShare) -> None:
        shape = list(target.shape)
        if shape[dimension] != share.size:
            raise ValueError(f"a target of shape {shape} for {share.size} elements of dimension {dimension}")
        shape[dimension] = share.whole
        self.shape, self.device = torch.Size(shape), target.device
        self.target, self._dimension, self._share = target, dimension, share

    def copy_(self, tensor: torch.Tensor) -> None:
        """Copy the share from ``tensor``, the whole tensor."""
        self.target.copy_(tensor.narrow(self._dimension, self._share.start, self._share.size))

    def read(self, stored: Any) -> None:
        """Read the share from ``stored``, the result of ``get_slice`` of ``safetensors``."""
        if self._share.size == 0:
            return
        span = slice(self._share.start, self._share.start + self._share.size)
        self.target.copy_(stored[:, span] if self._dimension else stored[span])

    def keeps(self, scheme: Scheme) -> bool:
        """Return whether ``copy_quantized`` takes weights of ``scheme``."""
        return keeps(self.target, scheme)

    def check_quantized(self, weight: QuantizedWeight) -> None:
        """Raise ``ValueError`` if ``copy_quantized`` would refuse ``weight``."""
        if self._share.size:
            self.target.check_quantized(self._share_of(weight))

    def copy_quantized(self, weight: QuantizedWeight) -> None:
        """Store the share of ``weight``, the whole weight. Raises ``ValueError`` if it cuts a block."""
        if self._share.size:
            self.target.copy_quantized(self._share_of(weight))

    def _share_of(self, weight: QuantizedWeight) -> QuantizedWeight:
        return weight.narrow(self._dimension, self._share.start, self._share.size)

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the share to the first rows of the whole tensor, ``rows`` float32."""
        span = slice(self._share.start, self._share.start + self._share.size)
        part = rows[:, span] if self._dimension else rows[span]
        if part.numel():
            copy_rows(self.target, part)


class ConvertedTarget:
    """A load target that stores ``convert(tensor)`` in ``target``. ``shape`` is that of the tensor.

    ``invert`` returns the tensor from the stored values, except for rounding.
    """

    def __init__(self, target: Any, shape: torch.Size, convert: Conversion, invert: Conversion) -> None:
        self.shape, self.device = shape, target.device
        self._target, self._convert, self._invert = target, convert, invert

    def copy_(self, tensor: torch.Tensor) -> None:
        """Convert and store ``tensor``, in float32 to round once only."""
        self._target.copy_(self._convert(tensor.float()))

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first rows of the tensor to ``rows``, float32."""
        stored = torch.empty(self._target.shape, dtype=torch.float32)
        copy_rows(self._target, stored)
        rows.copy_(self._invert(stored)[: len(rows)])


class PartTargets:
    """A load target for a stored tensor that contains several tensors of the model, or one tensor in another form.

    Raises ``ValueError`` if the shape of a part differs from that of its target.
    """

    def __init__(self, stored: CheckpointTensor, targets: Mapping[str, Any]) -> None:
        """Find the targets of the parts. ``targets`` are by the model's names. Parts without a target are skipped."""
        self._parts = [(part, targets[part.name]) for part in stored.parts if part.name in targets]
        self.shape, self.device = torch.Size(stored.shape), self._parts[0][1].device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Store the parts of ``tensor``."""
        self.read(tensor)

    def read(self, stored: Any) -> None:
        """Store the parts of ``stored``, a tensor or the result of ``get_slice`` of ``safetensors``."""
        for part, target in self._parts:
            tensor = _part(stored, part)
            if tensor.shape != target.shape:
                raise ValueError(f"{part.name} has shape {list(tensor.shape)}, its target {list(target.shape)}")
            target.copy_(tensor)

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the parts to the first rows of the stored tensor, ``rows`` float32."""
        for part, target in self._parts:
            if (isinstance(part.rows, int) and part.rows >= len(rows)) or not (found := _part(rows, part)).numel():
                continue
            copy_rows(target, found)


def _part(stored: Any, part: Part) -> torch.Tensor:
    tensor: torch.Tensor = stored[part.rows if part.rows is not None else slice(None)]
    if part.first is not None:
        tensor = tensor[..., part.first :: 2]
    return tensor.transpose(-2, -1) if part.transposed else tensor


def load_targets(targets: Mapping[str, Any], config: ModelConfig, ranks: Ranks) -> dict[str, Any]:
    """Return load targets for the tensors of a checkpoint that this rank needs, by name.

    ``targets`` maps the model's names to the rank's parameters, each of which holds a share of a tensor of the model.
    ``config`` describes the whole model.
    """
    tensors = slice_targets(_conversions(targets, config), config, ranks)
    found = {}
    for name, stored in checkpoint_tensors(config).items():
        if stored.parts == (Part(stored.parts[0].name),) and stored.parts[0].name in tensors:
            found[name] = tensors[stored.parts[0].name]
        elif any(part.name in tensors for part in stored.parts):
            found[name] = PartTargets(stored, tensors)
    return found


def _conversions(targets: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return ``targets`` with the conversions that ``config`` describes: head order, offsets, multipliers."""
    found = dict(targets)
    queries, values = query_order(config), value_order(config)
    plain = list(range(config.head_dim))
    # A norm over padded heads divides by too many elements; see ``Attention.eps``.
    shrink = (config.stored_head_dim / config.head_dim) ** 0.5
    for name, target in targets.items():
        module, kind = name.split(".")[-2:]
        if module in ("q_proj", "k_proj", "q_norm", "k_norm") and queries != plain:
            factor = shrink if module.endswith("norm") else 1.0
            target = _with_heads(target, 0, queries, config.stored_head_dim, factor)
        elif module == "v_proj" and values != plain:
            target = _with_heads(target, 0, values, config.stored_head_dim)
        elif module == "o_proj" and kind == "weight" and values != plain:
            target = _with_heads(target, 1, values, config.stored_head_dim)
        if module in _NORMS and config.norm_offset:
            target = _scaled(target, 1.0, config.norm_offset)
        if module in ("o_proj", "down_proj") and config.residual_multiplier != 1:
            target = _scaled(target, config.residual_multiplier)
        if name == "model.norm.weight" and config.logits_multiplier != 1:
            target = _scaled(target, config.logits_multiplier)
        found[name] = target
    return found


def _scaled(target: Any, factor: float, offset: float = 0.0) -> ConvertedTarget:
    return ConvertedTarget(
        target, target.shape, lambda tensor: (tensor + offset) * factor, lambda tensor: tensor / factor - offset
    )


def _with_heads(target: Any, dimension: int, order: list[int], stored: int, factor: float = 1.0) -> ConvertedTarget:
    """Return a target whose heads, along ``dimension``, have ``stored`` elements. ``order`` is from ``heads``."""
    shape = list(target.shape)
    heads = shape[dimension] // len(order)
    shape[dimension] = heads * stored
    index = torch.tensor([element if element >= 0 else stored for element in order])
    places = torch.tensor([order.index(element) for element in range(stored)])

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        split = tensor.unflatten(dimension, (heads, stored))
        zeros = torch.zeros_like(split.narrow(dimension + 1, 0, 1))
        chosen = torch.cat((split, zeros), dimension + 1).index_select(dimension + 1, index.to(tensor.device))
        return chosen.flatten(dimension, dimension + 1) * factor

    def invert(tensor: torch.Tensor) -> torch.Tensor:
        split = tensor.unflatten(dimension, (heads, len(order)))
        found: torch.Tensor = split.index_select(dimension + 1, places).flatten(dimension, dimension + 1) / factor
        return found

    return ConvertedTarget(target, torch.Size(shape), convert, invert)


def slice_targets(targets: Mapping[str, Any], config: ModelConfig, ranks: Ranks) -> dict[str, Any]:
    """Return load targets for whole tensors of the model, by name.

    Tensors that are not split keep their target: norms of the residual stream, routers, the experts of a rank that
    holds whole ones, and the biases of ``o_proj`` and ``down_proj``.
    """
    if ranks.tp_size == 1:
        return dict(targets)
    heads = evenly(config.heads, ranks)
    queries, keys = heads.times(config.stored_head_dim), kv_heads_of(config, ranks).times(config.stored_head_dim)
    rows = vocabulary_of(config, ranks)[0]
    by_outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "embed_tokens": rows, "lm_head": rows}
    if any(layer.attention.qk_norm == "whole" for layer in config.layers):
        by_outputs |= {"q_norm": queries, "k_norm": keys}
    sliced = {}
    for name, target in targets.items():
        *path, module, kind = name.split(".")
        if "experts" in path and ranks.whole_experts:
            pass
        elif module in by_outputs:
            target = SliceTarget(target, 0, by_outputs[module])
        elif kind == "sinks":
            target = SliceTarget(target, 0, heads)
        elif module in ("gate_proj", "up_proj"):
            target = SliceTarget(target, 0, evenly(target.shape[0] * ranks.tp_size, ranks))
        elif module in ("o_proj", "down_proj") and kind == "weight":
            target = SliceTarget(target, 1, evenly(target.shape[1] * ranks.tp_size, ranks))
        sliced[name] = target
    return sliced
