"""Attention as one opaque operator, so that a compiled model is a single graph whatever the backend does inside."""

import threading
from collections.abc import Callable

import torch

from services.worker.attention.base import AttentionBackend, AttentionBatch, AttentionStep, RotatingAttentionStep

# The operator takes tensors and numbers only; the step that it runs in is the calling thread's.
_active = threading.local()


@torch.library.custom_op("tokasaurus::attention", mutates_args=())
def _attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    attended: torch.Tensor = _active.step.run(layer, queries, keys, values)
    return attended


@_attention.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    return queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])


class TraceableAttention(AttentionBackend):
    """``backend`` for a compiled model."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend, self._step = backend, TraceableStep()

    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> "TraceableStep":
        _active.step = self._backend.step(batch, stored)
        return self._step


class TraceableStep(AttentionStep):
    """Without state, so that compiled code has nothing of a step to guard on."""

    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = torch.ops.tokasaurus.attention(queries, keys, values, layer)
        return attended


# Defined without torch's checks of what an operator does with its arguments: at 16 layers they take a millisecond.
_library = torch.library.Library("tokasaurus", "FRAGMENT")
_library.define("attend(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, int layer, int width) -> Tensor")


@torch.library.impl(_library, "attend", "CompositeExplicitAutograd")
def _attend(
    qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float, layer: int, width: int
) -> torch.Tensor:
    attended: torch.Tensor = _active.step.run_qkv(layer, qkv, q_norm, k_norm, eps)
    return attended


@torch.library.register_fake("tokasaurus::attend", lib=_library)
def _(
    qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float, layer: int, width: int
) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], width)


def activate(step: RotatingAttentionStep) -> None:
    """From here on ``TraceableRotation`` runs ``step`` in the calling thread."""
    _active.step = step


def deactivate() -> None:
    """Hold on to no step, nor to the cache it writes."""
    _active.step = None


class TraceableRotation(RotatingAttentionStep, torch.nn.Module):
    """Without a step's state, too. A module, so that compilers take its number for a constant."""

    def __init__(self, width: int) -> None:
        """``width``: of the output, heads times head_dim."""
        super().__init__()
        self._width = width

    def run_qkv(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        attended: torch.Tensor = torch.ops.tokasaurus.attend(qkv, q_norm, k_norm, eps, layer_index, self._width)
        return attended
