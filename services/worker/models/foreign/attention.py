"""The attention function of transformers' layers, which runs the attention of the worker's step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from services.worker.attention.base import AttentionStep, RotatingAttentionStep
from services.worker.attention.compiled import FIRST_LAYER

NAME = "tokasaurus"  # of the attention function, in ``config._attn_implementation``
LAYER = "tokasaurus_layer"  # attribute of an attention module: the number of its layer
# Elements of a head in the cache, an attribute of an attention module.
HEAD_DIM = "tokasaurus_head_dim"

AnyStep = AttentionStep | RotatingAttentionStep

# Attribute of the attention modules of a compiled model: the proxy of the active step, see ``attention/compiled.py``.
PROXY = "tokasaurus_proxy"

# The signature of attention functions has no argument for the step, so it is a variable of the calling thread.
_active = threading.local()


@contextmanager
def running(step: AnyStep) -> Iterator[None]:
    """Make the attention of all layers run ``step`` in the calling thread, inside the context."""
    _active.step = step
    try:
        yield
    finally:
        _active.step = None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run the active step for the layer of ``module``.

    ``query [1, heads, tokens, size]``, ``key [1, kv_heads, tokens, size]`` and ``value [1, kv_heads, tokens,
    value_size]`` are rotated. Returns ``[1, tokens, heads, value_size]``. The step follows the rules that were recorded
    when the model was made, so scale, mask and other arguments are not read.
    """
    layer, head_dim = getattr(module, LAYER), getattr(module, HEAD_DIM)
    step = getattr(module, PROXY, None)
    if step is None:
        step = _active.step
    elif torch.compiler.is_compiling():
        layer += FIRST_LAYER
    tokens, heads, value_size = query.shape[2], query.shape[1], value.shape[3]
    queries, keys, values = (_padded(each[0].transpose(0, 1), head_dim) for each in (query, key, value))
    if step.rotates:
        joined = torch.cat((queries, keys, values), dim=1).flatten(1)
        attended = step.run_qkv(layer, joined, None)
    else:
        attended = step.run(layer, queries, keys, values)
    return attended.view(1, tokens, heads, head_dim)[..., :value_size], None


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``tensor [tokens, heads, elements]`` with zeros behind the elements of each head, ``size`` in all."""
    missing = size - tensor.shape[2]
    return F.pad(tensor, (0, missing)) if missing else tensor


def register() -> None:
    """Add the attention function to those of transformers."""
    AttentionInterface.register(NAME, attend)
