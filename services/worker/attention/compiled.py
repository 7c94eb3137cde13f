"""Attention as one opaque operator, so that a compiled layer is a single graph, whatever the backend does inside.

All layers run the same compiled code, so the number of the layer is one of its inputs. Compilers treat the inputs 0 and
1 as constants, so compiled code counts layers from ``FIRST_LAYER``.
"""

import threading
from collections.abc import Callable

import torch

from services.worker.attention.base import AttentionBackend, AttentionBatch, AttentionStep, RotatingAttentionStep

# The number that compiled code has for layer 0.
FIRST_LAYER = 2

# The operator takes tensors and numbers only. The step that it runs belongs to the calling thread.
_active = threading.local()


@torch.library.custom_op("tokasaurus::attention", mutates_args=())
def _attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    attended: torch.Tensor = _active.step.run(layer - FIRST_LAYER, queries, keys, values)
    return attended


@_attention.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    return queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])


class TraceableAttention(AttentionBackend):
    """The attention of a compiled model, done by ``backend``."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend, self._step = backend, TraceableStep()

    def step(self, batch: AttentionBatch, stored: Callable[[], object]) -> "TraceableStep":
        _active.step = self._backend.step(batch, stored)
        return self._step


class TraceableStep(AttentionStep):
    """A stand-in for the active step. It has no state, so compiled code has nothing of a step to guard on."""

    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            layer += FIRST_LAYER
        attended: torch.Tensor = torch.ops.tokasaurus.attention(queries, keys, values, layer)
        return attended


# Defined without torch's checks of an operator's effects on its arguments: for 16 layers they take a millisecond.
_library = torch.library.Library("tokasaurus", "FRAGMENT")
_library.define("attend(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, SymInt layer, int width) -> Tensor")


@torch.library.impl(_library, "attend", "CompositeExplicitAutograd")
def _attend(
    qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float, layer: int, width: int
) -> torch.Tensor:
    attended: torch.Tensor = _active.step.run_qkv(layer - FIRST_LAYER, qkv, q_norm, k_norm, eps)
    return attended


@torch.library.register_fake("tokasaurus::attend", lib=_library)
def _(
    qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float, layer: int, width: int
) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], width)


def activate(step: RotatingAttentionStep) -> None:
    """Have ``TraceableRotation`` run ``step`` in the calling thread from now on."""
    _active.step = step


def deactivate() -> None:
    """Release the active step, and with it the cache that the step writes."""
    _active.step = None


class TraceableRotation(RotatingAttentionStep, torch.nn.Module):
    """A stand-in for the active step, without state. It is a module because compilers treat a module's numbers as
    constants."""

    def __init__(self, width: int) -> None:
        """``width``: heads times head_dim, the width of the output."""
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
        if not torch.compiler.is_compiling():
            layer_index += FIRST_LAYER
        attended: torch.Tensor = torch.ops.tokasaurus.attend(qkv, q_norm, k_norm, eps, layer_index, self._width)
        return attended
