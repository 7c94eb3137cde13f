"""Interfaces of attention backends, which store the keys and values of a step in pages and attend over them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from services.worker.attention.kv_cache import KvCache


@dataclass(frozen=True)
class AttentionBatch:
    """A shard of a step's flattened tokens. A row is a range of consecutive tokens of one slot.

    All arrays are numpy arrays on the host. ``page_table`` is the table of all slots.
    """

    token_slots: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64, position in the sequence; a token attends to positions 0 to its own
    row_slots: np.ndarray  # [rows] int64
    row_starts: np.ndarray  # [rows] int64, index of the row's first token in this shard
    row_counts: np.ndarray  # [rows] int64, tokens of the row
    page_table: np.ndarray  # [max_slots, max_pages] int32


@dataclass(frozen=True)
class LayerAttention:
    """Rules by which one layer computes scores and weights. A default means that the layer lacks the feature."""

    scale: float  # factor of the products of queries and keys
    window: int | None = None  # most recent tokens that a token attends to, itself included; None = all tokens
    soft_cap: float | None = None  # scores become ``soft_cap * tanh(score / soft_cap)``; None = they do not change
    # [heads of this rank] float32, a score per head that takes part in the softmax and has no value; None = no sinks
    sinks: torch.Tensor | None = None
    rope: int | None = 0  # index of the rotation of queries and keys; None = they are not rotated


def layer_rules(layers: Sequence[LayerAttention], cache: KvCache) -> list[LayerAttention]:
    """Return the rules of each layer of ``cache``. Empty ``layers`` stands for default rules for all layers."""
    return list(layers) or [LayerAttention(cache.keys[0].shape[-1] ** -0.5)] * len(cache.keys)


class AttentionStep(ABC):
    """Attention of one shard of a step. One thread uses it, layer by layer."""

    rotates: Literal[False] = False

    @abstractmethod
    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store ``keys`` and ``values``, wait until all shards have stored theirs, and attend.

        ``queries [tokens, heads, head_dim]`` and ``keys [tokens, kv_heads, head_dim]`` are rotated. They and ``values
        [tokens, kv_heads, head_dim]`` may be strided views. Returns ``[tokens, heads * head_dim]``.
        """


class HeadNorms(NamedTuple):
    """RMS norms over each head of queries and of keys."""

    queries: torch.Tensor  # [head_dim], the weight
    keys: torch.Tensor  # [head_dim], the weight
    eps: float


class RotatingAttentionStep(ABC):
    """Attention of a step for backends that also normalise and rotate queries and keys."""

    rotates: Literal[True] = True

    @abstractmethod
    def run_qkv(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """Normalise, rotate, store and attend. Returns ``[tokens, heads * head_dim]``.

        ``qkv [tokens, (heads + 2 * kv_heads) * head_dim]`` is the contiguous projection and may be overwritten.
        Heads are normalised before the rotation; None = they are not normalised.
        """


class PreallocatedAttentionStep(RotatingAttentionStep):
    """Attention of a step that can write to a given output tensor."""

    def __init__(self, width: int) -> None:
        """``width`` is that of the output, heads times head_dim."""
        self._width = width

    def run_qkv(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        output = qkv.new_empty(qkv.shape[0], self._width)
        self.run_into(layer_index, qkv, norms, output)
        return output

    @abstractmethod
    def run_into(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None, output: torch.Tensor) -> None:
        """Write the result of ``run_qkv`` to ``output [tokens, heads * head_dim]``."""


class AttentionBackend(ABC):
    """Attention over one KV cache."""

    @abstractmethod
    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> AttentionStep | RotatingAttentionStep:
        """Return the attention of ``batch``, for use by the calling thread.

        ``stored()`` blocks until all shards of the step have stored the keys and values of the layer.
        """
