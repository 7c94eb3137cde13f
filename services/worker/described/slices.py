"""A rank's part of a checkpoint's tensor, as a place to load into: only that part is read."""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks
from services.worker.described.shares import Share, evenly, kv_heads_of, vocabulary_of


class Slice:
    """``target`` holds ``share`` of a tensor's ``dimension``. ``shape`` is the whole tensor's."""

    def __init__(self, target: Any, dimension: int, share: Share) -> None:
        shape = list(target.shape)
        if shape[dimension] != share.size:
            raise ValueError(f"a target of shape {shape} for {share.size} elements of dimension {dimension}")
        shape[dimension] = share.whole
        self.shape, self.device = torch.Size(shape), target.device
        self._target, self._dimension, self._share = target, dimension, share

    def copy_(self, tensor: torch.Tensor) -> None:
        """From the whole tensor."""
        self._target.copy_(tensor.narrow(self._dimension, self._share.start, self._share.size))

    def read(self, stored: Any) -> None:
        """From what ``safetensors`` gives for ``get_slice``: nothing else of it is read."""
        if self._share.size == 0:
            return
        run = slice(self._share.start, self._share.start + self._share.size)
        self._target.copy_(stored[:, run] if self._dimension else stored[run])


def slice_targets(targets: Mapping[str, Any], config: ModelConfig, ranks: Ranks) -> dict[str, Any]:
    """``targets`` (checkpoint name -> what this rank has of it) as places for the checkpoint's own tensors.

    ``config`` is the whole model's. What is not split is left as it is: norms, and the biases that are added to the sum
    over the ranks.
    """
    if ranks.tp_size == 1:
        return dict(targets)
    heads = evenly(config.heads, ranks).times(config.head_dim)
    kv_heads = kv_heads_of(config, ranks).times(config.head_dim)
    inner, rows = evenly(config.intermediate_size, ranks), vocabulary_of(config, ranks)[0]
    by_outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": inner, "up_proj": inner}
    by_outputs |= {"embed_tokens": rows, "lm_head": rows}
    by_inputs = {"o_proj": heads, "down_proj": inner}
    found = {}
    for name, target in targets.items():
        module, kind = name.split(".")[-2:]
        if module in by_outputs:
            target = Slice(target, 0, by_outputs[module])
        elif module in by_inputs and kind == "weight":
            target = Slice(target, 1, by_inputs[module])
        found[name] = target
    return found
