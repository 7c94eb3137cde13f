"""Attention as an opaque operator, so that torch.compile makes a single graph of a layer with any backend.

All layers run the same compiled code, and the number of the layer is an input. torch.compile treats the inputs 0 and 1
as constants, so compiled code counts layers from ``FIRST_LAYER``.
"""

import threading
from collections.abc import Callable

import torch

from services.worker.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionStep,
    HeadNorms,
    RotatingAttentionStep,
)
from services.worker.layers.operators import operator

# Number of layer 0 in compiled code.
FIRST_LAYER = 2
_NO_NORMS = None, None, 0.0  # in place of ``HeadNorms``

# The operator's arguments can only be tensors and numbers, so the step is a variable of the calling thread.
_active = threading.local()


@operator(
    "attention(Tensor queries, Tensor keys, Tensor values, SymInt layer) -> Tensor",
    lambda queries, keys, values, layer: queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2]),
)
def _attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    attended: torch.Tensor = _active.step.run(layer - FIRST_LAYER, queries, keys, values)
    return attended


class TraceableAttention(AttentionBackend):
    """Attention backend for a compiled model, which delegates to ``backend``."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend, self._step = backend, TraceableStep()

    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> "TraceableStep":
        _active.step = self._backend.step(batch, stored)
        return self._step


class TraceableStep(AttentionStep):
    """Proxy of the active step. It has no state on which compiled code would have to guard."""

    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            layer += FIRST_LAYER
        attended: torch.Tensor = torch.ops.tokasaurus.attention(queries, keys, values, layer)
        return attended


@operator(
    "attend(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, SymInt layer, int width) -> Tensor",
    lambda qkv, q_norm, k_norm, eps, layer, width: qkv.new_empty(qkv.shape[0], width),
)
def _attend(
    qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float, layer: int, width: int
) -> torch.Tensor:
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, eps)
    attended: torch.Tensor = _active.step.run_qkv(layer - FIRST_LAYER, qkv, norms)
    return attended


def activate(step: RotatingAttentionStep) -> None:
    """Make ``TraceableRotation`` run ``step`` in the calling thread."""
    _active.step = step


def deactivate() -> None:
    """Release the active step, and with it the cache that the step writes."""
    _active.step = None


class TraceableRotation(RotatingAttentionStep, torch.nn.Module):
    """Proxy of the active step, without state.

    It is a module because torch.compile treats the numbers of a module as constants.
    """

    def __init__(self, width: int) -> None:
        """``width`` is that of the output, heads times head_dim."""
        super().__init__()
        self._width = width

    def run_qkv(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            layer_index += FIRST_LAYER
        attended: torch.Tensor = torch.ops.tokasaurus.attend(qkv, *(norms or _NO_NORMS), layer_index, self._width)
        return attended
