"""What an attention backend is: something that stores a step's keys and values in pages and attends over them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from services.worker.attention.kv_cache import KvCache
from services.worker.described.config import Windows


@dataclass(frozen=True)
class AttentionBatch:
    """One shard of a step's flattened tokens. A row is a run of consecutive tokens of one slot.

    All arrays are numpy on the host; ``page_table`` is the whole table of all slots, on host and device.
    """

    token_slots: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64, place in its sequence; a token sees positions 0 to its own
    row_slots: np.ndarray  # [rows] int64
    row_starts: np.ndarray  # [rows] int64, index of the row's first token in this shard
    row_counts: np.ndarray  # [rows] int64, tokens
    page_table: np.ndarray  # [max_slots, max_pages] int32


def layer_windows(windows: Windows, cache: KvCache) -> Windows:
    """Return ``windows`` with an entry for each layer of ``cache``; empty means that no layer has a window."""
    return windows or (None,) * len(cache.keys)


class AttentionStep(ABC):
    """One shard of one step, made by a backend; used by one thread, layer by layer."""

    rotates: Literal[False] = False

    @abstractmethod
    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store ``keys`` and ``values``, wait until every shard has, and attend.

        ``queries [tokens, heads, head_dim]``, ``keys`` and ``values [tokens, kv_heads, head_dim]``, all rotated already
        and possibly strided views; returns ``[tokens, heads * head_dim]``.
        """


class RotatingAttentionStep(ABC):
    """In the place of ``AttentionStep`` for a backend that norms and rotates queries and keys while it stores."""

    rotates: Literal[True] = True

    @abstractmethod
    def run_qkv(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Norm, rotate, store and attend.

        ``qkv [tokens, (heads + 2 * kv_heads) * head_dim]`` is the raw projection: queries, keys and values side by
        side, contiguous; it may be overwritten. ``q_norm`` and ``k_norm [head_dim]``, both or neither: weights of an
        RMS norm (with ``eps``) over each head before the rotation. Returns ``[tokens, heads * head_dim]``.
        """


class PlacedAttentionStep(RotatingAttentionStep):
    """One that writes where it is told to."""

    def __init__(self, width: int) -> None:
        """``width``: of the output, heads times head_dim."""
        self._width = width

    def run_qkv(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        output = qkv.new_empty(qkv.shape[0], self._width)
        self.run_into(layer_index, qkv, q_norm, k_norm, eps, output)
        return output

    @abstractmethod
    def run_into(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        output: torch.Tensor,
    ) -> None:
        """``run_qkv``, with a place for what it returns."""


class AttentionBackend(ABC):
    """Bound to one KV cache. ``step`` is called by the thread that will use what it returns."""

    @abstractmethod
    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> AttentionStep | RotatingAttentionStep:
        """``stored()`` returns once every shard of the step has stored its keys and values of the layer."""
