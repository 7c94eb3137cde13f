"""Load targets that read only a rank's share of a checkpoint's tensor."""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks
from services.worker.described.shares import RankShare, evenly, kv_heads_of, vocabulary_of


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


def slice_targets(targets: Mapping[str, Any], config: ModelConfig, ranks: Ranks) -> dict[str, Any]:
    """Return load targets for the tensors of a checkpoint, by name.

    ``targets`` maps each name to the rank's parameter, which holds a share of the stored tensor. ``config`` describes
    the whole model. Tensors that are not split keep their target: norms, and the biases of ``o_proj`` and
    ``down_proj``.
    """
    if ranks.tp_size == 1:
        return dict(targets)
    heads = evenly(config.heads, ranks).times(config.head_dim)
    kv_heads = kv_heads_of(config, ranks).times(config.head_dim)
    inner, rows = evenly(config.intermediate_size, ranks), vocabulary_of(config, ranks)[0]
    by_outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": inner, "up_proj": inner}
    by_outputs |= {"embed_tokens": rows, "lm_head": rows}
    by_inputs = {"o_proj": heads, "down_proj": inner}
    sliced = {}
    for name, target in targets.items():
        module, kind = name.split(".")[-2:]
        if module in by_outputs:
            target = SliceTarget(target, 0, by_outputs[module])
        elif module in by_inputs and kind == "weight":
            target = SliceTarget(target, 1, by_inputs[module])
        sliced[name] = target
    return sliced
