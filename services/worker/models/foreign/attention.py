"""The attention function of transformers' layers, which runs the attention of the worker's step."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from services.worker.attention.base import AttentionStep, RotatingAttentionStep
from services.worker.attention.compiled import FIRST_LAYER
from services.worker.models.foreign import products

NAME = "tokasaurus"  # of the attention function, in ``config._attn_implementation``
CALLS = "tokasaurus_calls"  # attribute of an attention module: a ``CallLayer`` for each of its calls in a step
_DIGITS = 16  # base of the digits of positions, which every precision represents exactly
# Half of the distance of scores of keys in the same chunk to those of others, whose weights then are zeros.
_SAME_CHUNK = 128.0


@dataclass(frozen=True)
class CallLayer:
    """The layer of the cache that a call of the attention function uses, and its heads there."""

    layer: int
    kv_heads: int
    group: int  # heads of queries for each head of keys
    head_dim: int
    # Elements of each head's query that add a bias to its scores, with digits of positions as elements of the keys.
    bias: torch.Tensor | None = None  # [heads of the model, elements]
    # Tokens attend to those of the same chunk of this size only. It is the window of the layer, too.
    chunk: int | None = None
    same_chunk: float = 0.0  # element of queries that adds ``_SAME_CHUNK`` to scores, with 1 as element of the keys


AnyStep = AttentionStep | RotatingAttentionStep

# Attribute of the attention modules of a compiled model: the proxy of the active step, see ``attention/compiled.py``.
PROXY = "tokasaurus_proxy"

# The signature of attention functions has no argument for the step, so it is a variable of the calling thread.
_active = threading.local()


@contextmanager
def running(step: AnyStep, positions: torch.Tensor) -> Iterator[None]:
    """Make the attention of all layers run ``step`` in the calling thread, inside the context.

    ``positions [tokens]`` are those of the tokens in their sequences.
    """
    _active.step, _active.positions, _active.calls = step, positions, {}
    try:
        yield
    finally:
        _active.step = _active.positions = None


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
    call = _next_call(module)
    layer, step = call.layer, getattr(module, PROXY, None)
    if step is None:
        step = _active.step
    elif torch.compiler.is_compiling():
        layer += FIRST_LAYER
    tokens, heads, value_size = query.shape[2], query.shape[1], value.shape[3]
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    if call.bias is not None:
        digits = digits_of(_active.positions, call.bias.shape[1], keys.dtype)
        queries = torch.cat((queries, call.bias.to(queries).expand(tokens, -1, -1)), dim=2)
        keys = torch.cat((keys, digits[:, None].expand(-1, keys.shape[1], -1)), dim=2)
    if call.chunk is not None:
        # The window reaches into one chunk before the token's. Signs of alternate chunks differ.
        signs = (1 - _active.positions // call.chunk % 2 * 2).to(queries)[:, None, None]
        queries = torch.cat((queries, (signs * call.same_chunk).expand(-1, heads, -1)), dim=2)
        keys = torch.cat((keys, signs.expand(-1, keys.shape[1], -1)), dim=2)
    queries, keys, values = (_padded(each, call.head_dim) for each in (queries, keys, values))
    kv_heads, spread = keys.shape[1], (call.kv_heads, call.group) != (keys.shape[1], heads // keys.shape[1])
    if spread:
        queries = spread_queries(queries, kv_heads, call)
        keys, values = (each.repeat_interleave(call.kv_heads // kv_heads, dim=1) for each in (keys, values))
    if step.rotates:
        joined = torch.cat((queries, keys, values), dim=1).flatten(1)
        attended = step.run_qkv(layer, joined, None)
    else:
        attended = step.run(layer, queries, keys, values)
    if spread:
        attended = attended.view(tokens, kv_heads, -1, call.head_dim)[:, :, : heads // kv_heads]
    return attended.reshape(1, tokens, heads, call.head_dim)[..., :value_size], None


def _next_call(module: nn.Module) -> CallLayer:
    """Return the next of the calls of ``module`` in this step."""
    calls: tuple[CallLayer, ...] = getattr(module, CALLS)
    if len(calls) == 1:
        return calls[0]
    done: int = _active.calls.get(module, 0)
    _active.calls[module] = done + 1
    return calls[done]


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``tensor [tokens, heads, elements]`` with zeros behind the elements of each head, ``size`` in all."""
    missing = size - tensor.shape[2]
    return F.pad(tensor, (0, missing)) if missing else tensor


def spread_queries(queries: torch.Tensor, kv_heads: int, call: CallLayer) -> torch.Tensor:
    """Return ``queries [tokens, heads, elements]`` of a layer with ``kv_heads`` in the order of the cache's heads.

    Each head of keys is there several times, and shares its queries among its copies. Added heads are zeros.
    """
    group = call.kv_heads // kv_heads * call.group
    grouped = queries.unflatten(1, (kv_heads, -1))
    return F.pad(grouped, (0, 0, 0, group - grouped.shape[2])).flatten(1, 2)


def bias_elements(max_tokens: int) -> int:
    """Return how many elements of a head give its scores a bias by the position of the key."""
    digits = 1
    while _DIGITS**digits < max_tokens:
        digits += 1
    return 3 * digits


def same_chunk_of(scale: float) -> float:
    """Return ``CallLayer.same_chunk`` for scores that are multiplied by ``scale``."""
    return _SAME_CHUNK / scale


def bias_of(slopes: Sequence[float], scale: float, max_tokens: int) -> torch.Tensor:
    """Return the elements of queries, ``[heads, elements]`` float32, that add ``slope * position`` of a key to a score.

    Scores are multiplied by ``scale``. Each element is the sum of three numbers that bfloat16 represents exactly.
    """
    digits = bias_elements(max_tokens) // 3
    powers = torch.tensor([_DIGITS ** max(0, digit - 1) for digit in range(digits)])
    rest = torch.tensor(slopes, dtype=torch.float64)[:, None] / scale * powers
    parts = []
    for _ in range(3):
        parts.append(rest.bfloat16().double())
        rest = rest - parts[-1]
    return torch.cat(parts, dim=1).float()


def digits_of(positions: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of keys at ``positions [tokens]``, ``[tokens, elements]``, for queries from ``bias_of``."""
    digits = []
    for digit in range(elements // 3):
        place = positions // _DIGITS**digit % _DIGITS
        digits.append(place if digit == 0 else place * _DIGITS)
    return torch.stack(digits * 3, dim=1).to(dtype)


def register() -> None:
    """Add the attention function, and the masks of models that compute attention themselves, to transformers' own."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(products.NAME, products.empty_mask)
