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
    _gather(known, slots, positions, last_tokens, page_table, history, token_ids, count, table_stride, offsets, PAGE)


@triton.jit(do_not_specialize=["capacity", "count", "table_stride"])
def _append_and_gather_inputs(
    append_slots, append_places, append_pages, known, slots, positions, last_tokens, page_table, history, token_ids,
    capacity, count, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``(1,)``: pages are in the table before the same program looks them up."""
    for start in range(0, capacity, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < capacity
        slot = tl.load(append_slots + offsets, inside, other=-1)
        place = tl.load(append_places + offsets, inside, other=0)
        page = tl.load(append_pages + offsets, inside, other=0)
        tl.store(page_table + slot.to(tl.int64) * table_stride + place, page, slot >= 0)
    tl.debug_barrier()
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        _gather(
            known, slots, positions, last_tokens, page_table, history, token_ids, count, table_stride, offsets, PAGE
        )


@triton.jit
def _gather(
    known, slots, positions, last_tokens, page_table, history, token_ids, count, table_stride, offsets,
    PAGE: tl.constexpr,
):  # fmt: skip
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
def _advance(token_ids, finite, slots, last_tokens, results, where, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    if where is not None:
        results += tl.load(where)
    slot = tl.load(slots + offsets, inside, other=-1)
    good = tl.load(finite + offsets, inside, other=0) != 0
    token = tl.load(token_ids + offsets, inside, other=0)
    tl.store(last_tokens + slot, tl.where(good, token, 0), slot >= 0)
    tl.store(results + offsets, tl.where(good, token, -1), slot >= 0)


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


def append_and_gather_inputs(
    appended: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    known: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    page_table: torch.Tensor,
    history: torch.Tensor,
) -> torch.Tensor:
    """``gather_inputs``, after ``page_table[slot, place] = page`` for each slot of ``appended`` that is not -1: slots,
    places and pages, ``[capacity]`` int32. For few tokens: all is done by one program."""
    token_ids = torch.empty_like(known)
    _append_and_gather_inputs[(1,)](
        *appended, known, slots, positions, last_tokens, page_table, history, token_ids, appended[0].numel(),
        known.numel(), page_table.stride(0), PAGE=history.shape[1], BLOCK=_BLOCK,
    )  # fmt: skip
    return token_ids


def advance(
    token_ids: torch.Tensor,
    finite: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    results: torch.Tensor,
    where: torch.Tensor | None = None,
) -> None:
    """Keep each row's token as its slot's last one (0 where it is not ``finite``) and in ``results`` (-1 there), from
    ``results[where[0]]`` on.

    ``token_ids [rows]`` int32, ``finite [rows]`` uint8 or bool; ``slots [rows]`` int32, -1 = padding, whose results are
    left alone. ``results`` int32 may be in pinned memory of the host.
    """
    count = slots.numel()
    _advance[(triton.cdiv(count, _BLOCK),)](token_ids, finite, slots, last_tokens, results, where, count, BLOCK=_BLOCK)
