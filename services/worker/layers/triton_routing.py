"""Kernels that choose the experts of each token, and sort the choices by expert, on CUDA.

A pair is a token with one of its experts. The pairs of an expert fill whole blocks of rows, and the last block of an
expert may have rows without a pair. All buffers have the size that the worst routing needs, so no result is read by
the host and CUDA graphs can hold these kernels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from services.worker.layers.expert_tiles import FEW_PAIRS, MANY_PAIRS
from services.worker.layers.experts import LEAST_SUM
from services.worker.layers.operators import operator

_LOWEST: tl.constexpr = tl.constexpr(-(1 << 63))  # below all keys
_MOST_EXPERTS_OF_A_WARP = 512
_FEWEST_BINS = 32  # of a histogram


class Blocks(NamedTuple):
    """The pairs of this rank's experts, sorted by expert, in blocks of ``rows`` pairs of the same expert."""

    pairs: torch.Tensor  # [most blocks * rows] int32, the number of all pairs in rows without a pair
    experts: torch.Tensor  # [most blocks] int32, the expert of each block, counted from the rank's first
    used: torch.Tensor  # [1] int32, the number of blocks that hold pairs

    @property
    def rows(self) -> int:
        """Number of rows of a block."""
        return len(self.pairs) // len(self.experts)


@triton.jit
def _keys(values, numbers, inside):
    """Return int64 keys, ordered by ``values`` and, for equal values, by descending ``numbers``.

    NaN counts as the largest value, as in torch. Keys outside of ``inside`` are below all others.
    """
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    bits = tl.where(values != values, 0x7FFFFFFF, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)
    return tl.where(inside, keys, _LOWEST)


@triton.jit
def _value(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _number(keys):
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _considered(keys, groups, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Return which of ``groups`` have the largest sum of their two best values. ``keys [groups, experts]``."""
    best = tl.max(keys, axis=1)
    sums = _value(best)
    if SIZE > 1:
        sums += _value(tl.max(tl.where(keys == best[:, None], _LOWEST, keys), axis=1))
    left = _keys(sums, groups, groups < GROUPS)
    for _ in range(CHOSEN_GROUPS):
        left = tl.where(left == tl.max(left, axis=0), _LOWEST, left)
    return (left == _LOWEST) & (groups < GROUPS)


@triton.jit
def _route(logits, correction, load, experts, weights, scale, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
           SCORES: tl.constexpr, CORRECTED: tl.constexpr, COUNTED: tl.constexpr, NORMALIZED: tl.constexpr,
           GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr, GROUP_WIDTH: tl.constexpr,
           CHOSEN_WIDTH: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Write the experts of a token, in the order of their scores, and their weights. Grid: ``(tokens,)``.

    ``COUNTED``: add the tokens of each expert to ``load``.
    """
    GROUP: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS_WIDTH), tl.arange(0, GROUP_WIDTH)
    numbers = groups[:, None] * GROUP + members[None, :]
    inside = (groups < GROUPS)[:, None] & (members < GROUP)[None, :]
    scores = tl.load(logits + row * EXPERTS + numbers, inside, other=-float("inf")).to(tl.float32)
    if SCORES == "softmax":
        powers = tl.exp(scores - tl.max(scores))
        scores = powers / tl.sum(powers)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction + numbers, inside, other=0.0)
    keys = _keys(ranked, numbers, inside)
    if GROUPS > 1:
        considered = _considered(keys, groups, GROUPS, CHOSEN_GROUPS, GROUP)
        keys = tl.where(considered[:, None], keys, _LOWEST)

    slots = tl.arange(0, CHOSEN_WIDTH)
    chosen = tl.zeros([CHOSEN_WIDTH], tl.int32)
    values = tl.full([CHOSEN_WIDTH], -float("inf"), tl.float32)
    for index in range(CHOSEN):
        best = tl.max(keys)
        found = keys == best  # one expert, because its number is a part of the key
        value = tl.sum(tl.where(found, scores, 0.0))
        keys = tl.where(found, _LOWEST, keys)
        chosen = tl.where(slots == index, _number(best), chosen)
        values = tl.where(slots == index, value, values)
    used = slots < CHOSEN
    if SCORES == "softmax_of_chosen":
        values = tl.exp(values - tl.max(values, axis=0))
        values = values / tl.sum(values, axis=0)
    elif NORMALIZED:
        total = tl.sum(tl.where(used, values, 0.0), axis=0)
        values = values / (total + LEAST if SCORES == "sigmoid" else total)
    tl.store(experts + row * CHOSEN + slots, chosen, used)
    tl.store(weights + row * CHOSEN + slots, values * scale, used)
    if COUNTED:
        tl.atomic_add(load + chosen, tl.full([CHOSEN_WIDTH], 1, tl.int64), used, sem="relaxed")


@triton.jit(do_not_specialize=["first", "pairs"])
def _count(experts, counts, first, pairs, BLOCK: tl.constexpr):
    """Write the number of pairs of an expert. Grid: ``(experts of this rank,)``."""
    expert = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += (tl.load(experts + offsets, offsets < pairs, other=-1) == expert + first).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["first", "pairs"])
def _place(experts, counts, sorted_pairs, block_experts, block_count, first, pairs, EXPERTS: tl.constexpr,
           WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
    """Write the pairs of an expert, in ascending order, and its blocks. Grid: ``(experts of this rank,)``.

    ``COUNTED``: ``counts`` are known. Otherwise there are at most ``BLOCK`` pairs, and each program counts them.
    """
    expert = tl.program_id(0)
    numbers, lanes = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    if COUNTED:
        per_expert = tl.load(counts + numbers, numbers < EXPERTS, other=0)
    else:
        chosen = tl.load(experts + lanes, lanes < pairs, other=-1) - first
        per_expert = tl.histogram(chosen, WIDTH, mask=(lanes < pairs) & (chosen >= 0) & (chosen < EXPERTS))
    blocks = (per_expert + ROWS - 1) // ROWS
    begin = tl.sum(tl.where(numbers < expert, blocks, 0), axis=0)
    end = begin + tl.sum(tl.where(numbers == expert, blocks, 0), axis=0)
    if expert == EXPERTS - 1:
        tl.store(block_count, end)
    for start in range(begin, end, BLOCK):
        tl.store(block_experts + start + lanes, expert, start + lanes < end)
    position = begin * ROWS
    for start in range(0, pairs, BLOCK):
        offsets = start + lanes
        found = (tl.load(experts + offsets, offsets < pairs, other=-1) == expert + first).to(tl.int32)
        tl.store(sorted_pairs + position + tl.cumsum(found, axis=0) - 1, offsets, found != 0)
        position += tl.sum(found, axis=0)
    rest = position + tl.arange(0, ROWS)
    tl.store(sorted_pairs + rest, pairs, rest < end * ROWS)


@operator(
    "route(Tensor logits, Tensor? correction, Tensor(a!)? load, str scores, bool normalized, int groups,"
    " int chosen_groups, float scale, int chosen) -> (Tensor, Tensor)",
    lambda logits, *rules: _empty_routes(logits, rules[-1]),
    "CUDA",
)
def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
    scores: str,
    normalized: bool,
    groups: int,
    chosen_groups: int,
    scale: float,
    chosen: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``layers.experts.route`` does for contiguous ``logits [tokens, experts]``, in one kernel.

    If ``load [experts]`` int64 is given, add the number of tokens of each expert to it. The arguments after it are the
    fields of ``RouterConfig``.
    """
    (tokens, count), (experts, weights) = logits.shape, _empty_routes(logits, chosen)
    width = triton.next_power_of_2(count // groups)
    _route[(tokens,)](
        logits, logits if correction is None else correction, experts if load is None else load, experts, weights,
        scale, EXPERTS=count, CHOSEN=chosen, SCORES=scores, CORRECTED=correction is not None, COUNTED=load is not None,
        NORMALIZED=normalized, GROUPS=groups, CHOSEN_GROUPS=chosen_groups,
        GROUPS_WIDTH=triton.next_power_of_2(groups), GROUP_WIDTH=width, CHOSEN_WIDTH=triton.next_power_of_2(chosen),
        LEAST=LEAST_SUM,
        num_warps=1 if count <= _MOST_EXPERTS_OF_A_WARP else 4,
    )  # fmt: skip
    return experts, weights


def sort_pairs(experts: torch.Tensor, first: int, count: int, rows: int) -> Blocks:
    """Return the pairs of ``count`` experts from ``first`` on in blocks of ``rows`` pairs, a power of two.

    ``experts [tokens, chosen]`` int32 are those of ``Routes``. Pair ``n`` is the token ``n // chosen`` with its expert
    ``n % chosen``. Pairs of other ranks' experts are left out.
    """
    pairs = experts.numel()
    most = most_blocks(pairs, count, rows)
    counts, found = experts, Blocks(*(experts.new_empty(size) for size in (most * rows, most, 1)))
    block, warps = (FEW_PAIRS, 4) if pairs <= FEW_PAIRS else (MANY_PAIRS, 8)
    if pairs > MANY_PAIRS:
        counts = experts.new_empty(count)
        _count[(count,)](experts, counts, first, pairs, BLOCK=block, num_warps=warps)
    _place[(count,)](
        experts, counts, *found, first, pairs, EXPERTS=count, WIDTH=max(_FEWEST_BINS, triton.next_power_of_2(count)),
        ROWS=rows, BLOCK=block, COUNTED=pairs > MANY_PAIRS, num_warps=warps,
    )  # fmt: skip
    return found


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return the largest number of blocks of any routing of ``pairs``.

    Each expert with a pair has at most ``rows - 1`` rows without one. The result does not depend on the routing, so
    memory that suffices for one step of this size suffices for all, also if all tokens choose the same experts.
    """
    used = min(pairs, experts)
    return used + (pairs - used) // rows


def _empty_routes(logits: torch.Tensor, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits.shape[0], chosen
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)
