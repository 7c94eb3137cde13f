"""Kernels for top-k, top-p and min-p as one threshold per row, found by bisection instead of a sort.

The thresholds are those of ``truncation.py``. Top-k gives the k-th largest logit, and top-p the lowest logit for which
the mass of larger logits is less than top_p. Min-p gives the largest scaled logit plus log(min_p). Each step of a
bisection counts or sums the logits above a bound. It reads only blocks whose maximum is above the bound, which become
few after some steps.
"""

import triton
import triton.language as tl

from services.worker.step.noise import NOISE_BLOCK

_BLOCK = tl.constexpr(NOISE_BLOCK)
_LOG2E = tl.constexpr(1.4426950408889634)
# All tokens whose scaled logit is this far below the largest together have less mass than float32 resolution near 1.
_DEEPEST = tl.constexpr(40.0)
# The first steps of the top-p bisection take the mean of the bounds as numbers, which converges fast for usual logits.
# Later steps take the mean of their bit patterns, which also converges near zero.
_STEPS_BY_VALUE = tl.constexpr(12)
_LOWEST_FINITE = tl.constexpr(-3.3e38)


@triton.jit
def find_lowest(
    logits,  # [n, vocab] bf16, fp16 or fp32, rows `stride` apart
    rows,  # [programs] int32, rows of `logits` and `scales`
    scales,  # [n] fp32, one over the temperature; 0 (greedy) = no truncation
    top_k,  # [programs] int32, 0 = off
    top_p,  # [programs] fp32, 1 = off
    log_min_p,  # [programs] fp32, minus infinity = off
    peaks,  # [n, blocks] fp32, from `summarise`
    sums,  # [n, blocks] fp32, from `summarise`
    lowest,  # [programs] fp32, out: scaled logits below it cannot be drawn
    lowest_of_row,  # [n] fp32, out: the same, indexed by row
    stride,
    vocab,
    blocks,
    WIDTH: tl.constexpr,  # blocks, rounded up to a power of two
    SHIFT: tl.constexpr,  # low bits that are zero in every float32 of the logits' type, see ``EMPTY_BITS``
):
    """Find the threshold of each row. Equal logits are kept or dropped together. Grid: ``(programs,)``."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program).to(tl.int64)
    scale = tl.load(scales + row)
    line = logits + row * stride
    block_ids = tl.arange(0, WIDTH)
    real = block_ids < blocks
    peak = tl.load(peaks + row * blocks + block_ids, mask=real, other=float("-inf"))
    total = tl.load(sums + row * blocks + block_ids, mask=real, other=0.0)
    largest = tl.max(peak)
    bound = float("-inf")
    if (scale > 0.0) & (tl.sum((total != total).to(tl.int32)) == 0):
        wanted = tl.load(top_k + program)
        share = tl.load(top_p + program)
        by_count = (wanted > 0) & (wanted < vocab)
        mass = tl.sum(tl.where(real, total * tl.exp2((peak - largest) * (scale * _LOG2E)), 0.0))
        base = peaks + row * blocks
        cut = tl.full((), _LOWEST_FINITE, tl.float32)
        if by_count:
            cut = _kth_largest(line, base, peak, wanted, largest, vocab, blocks, SHIFT)
            # Top-p applies to the mass of the tokens that top-k keeps, including those equal to the k-th.
            _, mass = _above(line, base, _value(_key(cut, SHIFT) - 1, SHIFT), largest, scale, vocab, blocks)
            bound = cut * scale
        if share < 1.0:
            floor = tl.maximum(largest - _DEEPEST / scale, _LOWEST_FINITE)
            start = tl.maximum(_key(floor, SHIFT), _key(cut, SHIFT)) - 1
            nucleus = _nucleus(line, base, share * mass, start, largest, scale, vocab, blocks, SHIFT)
            bound = tl.maximum(bound, nucleus * scale)
        bound = tl.maximum(bound, largest * scale + tl.load(log_min_p + program))
    tl.store(lowest + program, bound)
    tl.store(lowest_of_row + row, bound)


@triton.jit
def _kth_largest(line, base, peak, wanted, largest, vocab, blocks, SHIFT: tl.constexpr):
    """Return the largest value that at least ``wanted`` logits reach."""
    low = _key(tl.full((), _LOWEST_FINITE, tl.float32), SHIFT)  # reached by at least `wanted` logits
    high = _key(largest, SHIFT) + 1  # reached by fewer
    if wanted <= blocks:
        # The k-th largest peak is a lower bound, since k blocks have a logit of at least this size.
        top = high
        while top - low > 1:
            middle = low + (top - low) // 2
            enough = tl.sum((peak >= _value(middle, SHIFT)).to(tl.int32)) >= wanted
            low = tl.where(enough, middle, low)
            top = tl.where(enough, top, middle)
    while high - low > 1:
        middle = low + (high - low) // 2
        count, _ = _above(line, base, _value(middle - 1, SHIFT), largest, 0.0, vocab, blocks)
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _value(low, SHIFT)


@triton.jit
def _nucleus(line, base, mass, start, largest, scale, vocab, blocks, SHIFT: tl.constexpr):
    """Return the lowest value above the key ``start`` for which the mass of larger logits is less than ``mass``."""
    low = start
    high = _key(largest, SHIFT)
    step = 0
    while high - low > 1:
        middle = _middle(low, high, step, SHIFT)
        _, above = _above(line, base, _value(middle, SHIFT), largest, scale, vocab, blocks)
        less = above < mass
        low = tl.where(less, low, middle)
        high = tl.where(less, middle, high)
        step += 1
    return _value(high, SHIFT)


@triton.jit
def _above(line, base, value, largest, scale, vocab, blocks):
    """Return the number of logits above ``value``, and the sum of their exp(scale * (logit - largest))."""
    offsets = tl.arange(0, _BLOCK)
    counts = tl.zeros((_BLOCK,), tl.int32)
    powers = tl.zeros((_BLOCK,), tl.float32)
    for block in range(0, blocks):
        if tl.load(base + block) > value:
            columns = block * _BLOCK + offsets
            values = tl.load(line + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
            over = values > value
            counts += over.to(tl.int32)
            powers += tl.where(over, tl.exp2((values - largest) * (scale * _LOG2E)), 0.0)
    return tl.sum(counts), tl.sum(powers)


@triton.jit
def _middle(low, high, step, SHIFT: tl.constexpr):
    """Return a key between ``low`` and ``high``, which differ by more than one."""
    by_key = low + (high - low) // 2
    by_value = _key(_value(low, SHIFT) * 0.5 + _value(high, SHIFT) * 0.5, SHIFT)
    middle = tl.where(step < _STEPS_BY_VALUE, by_value, by_key)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """Map a float32 scalar to an int64 key with the same order. Keys of neighbouring values differ by one."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Return the float32 value of a key."""
    low_bits = tl.where(key < 0, (1 << SHIFT) - 1, 0)
    bits = ((key << SHIFT) | low_bits).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def distribute(
    values,  # [n, vocab] fp32, in and out: afterwards their softmax is the distribution that was drawn from
    rows,  # [programs] int32, rows of `values` and `scales`
    scales,  # [n] fp32, one over the temperature; 0 (greedy) is treated as 1
    lowest,  # [n] fp32, scaled logits below it cannot be drawn; unused unless TRUNCATED
    vocab,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale and truncate the logits of each row. Grid: ``(programs, blocks of the vocabulary)``."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    scale = tl.load(scales + row)
    scale = tl.where(scale == 0.0, 1.0, scale)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    scaled = tl.load(values + row * vocab + columns, mask=inside, other=0.0) * scale
    if TRUNCATED:
        scaled = tl.where(scaled < tl.load(lowest + row), float("-inf"), scaled)
    tl.store(values + row * vocab + columns, scaled, mask=inside)
