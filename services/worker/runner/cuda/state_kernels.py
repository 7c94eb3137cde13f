"""Small Triton kernels: gather the inputs of a step from the state on the device, and store sampled tokens in it."""

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
    """Append pages, and gather inputs from the new table. One program does both, so the grid is ``(1,)``."""
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
    """Set ``table.view(-1)[indices[i]] = values[i]``. ``indices [n]`` int64 are distinct; ``values [n]`` int32."""
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
    """Return token ids ``[tokens]`` int32: ``known``, or the slot's last token where ``known`` is -1; 0 for padding.

    Also store them in ``history [page_count, page_size]``, at the indices of their keys in the cache. ``known``,
    ``slots`` (-1 = padding) and ``positions`` are ``[tokens]``, ``last_tokens`` is ``[max_slots]``, ``page_table`` is
    ``[max_slots, max_pages]``. All are int32.
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
    """Append pages to ``page_table``, and then return ``gather_inputs``. For few tokens: one program does all.

    ``appended``: slots (-1 = none), indices in the slot's page table, and pages, ``[capacity]`` int32 each.
    """
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
    """Store the token of each row in ``last_tokens`` at its slot, and in ``results`` from index ``where[0]`` on.

    Where ``finite`` is False, the values are 0 and -1 instead. ``token_ids [rows]`` int32, ``finite [rows]`` uint8 or
    bool, ``slots [rows]`` int32; a slot of -1 is padding, without a result. ``results`` int32 may be pinned memory.
    """
    count = slots.numel()
    _advance[(triton.cdiv(count, _BLOCK),)](token_ids, finite, slots, last_tokens, results, where, count, BLOCK=_BLOCK)
