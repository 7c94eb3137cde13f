"""Small kernels around a step: its inputs from the state on the device, and the state from what was sampled."""

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _scatter(table, indices, values, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(table + tl.load(indices + offsets, inside), tl.load(values + offsets, inside), inside)


@triton.jit(do_not_specialize=["count", "table_stride"])
def _gather_inputs(
    known, slots, positions, last_tokens, page_table, history, token_ids, count, table_stride, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    slot = tl.load(slots + offsets, inside, other=-1)
    used = slot >= 0
    token = tl.load(known + offsets, inside, other=-1)
    last = tl.load(last_tokens + slot, used & (token < 0), other=0)
    token = tl.where(used, tl.where(token < 0, last, token), 0)
    tl.store(token_ids + offsets, token, inside)
    position = tl.load(positions + offsets, used, other=0)
    page = tl.load(page_table + slot.to(tl.int64) * table_stride + position // PAGE, used, other=0)
    tl.store(history + page.to(tl.int64) * PAGE + position % PAGE, token, used)


@triton.jit(do_not_specialize=["count"])
def _advance(token_ids, finite, slots, last_tokens, results, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    slot = tl.load(slots + offsets, inside, other=-1)
    good = tl.load(finite + offsets, inside, other=0) != 0
    token = tl.load(token_ids + offsets, inside, other=0)
    tl.store(last_tokens + slot, tl.where(good, token, 0), slot >= 0)
    tl.store(results + offsets, tl.where(good, token, -1), inside)


def scatter(table: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """``table.view(-1)[indices[i]] = values[i]``; ``indices [n]`` int64, each once, ``values [n]`` as the table."""
    count = indices.numel()
    _scatter[(triton.cdiv(count, _BLOCK),)](table, indices, values, count, BLOCK=_BLOCK)


def gather_inputs(
    known: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    page_table: torch.Tensor,
    history: torch.Tensor,
) -> torch.Tensor:
    """Token ids ``[tokens]`` int32: ``known`` where it is not -1, else what the slot sampled last; 0 for padding.

    They are also kept in ``history [page_count, page_size]``, where their keys will be in the cache. ``known``,
    ``slots`` (-1 = padding) and ``positions [tokens]``, ``last_tokens [max_slots]`` and ``page_table [max_slots,
    max_pages]``: all are int32.
    """
    token_ids, count = torch.empty_like(known), known.numel()
    _gather_inputs[(triton.cdiv(count, _BLOCK),)](
        known, slots, positions, last_tokens, page_table, history, token_ids, count, page_table.stride(0),
        PAGE=history.shape[1], BLOCK=_BLOCK,
    )  # fmt: skip
    return token_ids


def advance(
    token_ids: torch.Tensor, finite: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, results: torch.Tensor
) -> None:
    """Keep each row's token as its slot's last one (0 where it is not ``finite``) and in ``results`` (-1 there).

    ``token_ids``, ``results [rows]`` int32, ``finite [rows]`` uint8 or bool; ``slots [rows]`` int32, -1 = padding.
    """
    count = slots.numel()
    _advance[(triton.cdiv(count, _BLOCK),)](token_ids, finite, slots, last_tokens, results, count, BLOCK=_BLOCK)
