"""Kernels that draw tokens from block summaries and look up their log-probabilities."""

import triton
import triton.language as tl

from services.worker.sampling.triton_noise import gumbel
from services.worker.step.noise import NOISE_BLOCK

_BLOCK = tl.constexpr(NOISE_BLOCK)


@triton.jit
def pick(
    logits,  # [n, vocab] bf16, fp16 or fp32, rows `stride` apart
    scales,  # [n] fp32, one over the temperature; 0 = greedy
    keys,  # [n, 2] int32, select the noise
    lowest,  # [n] fp32, scaled logits below it cannot be drawn; unused unless TRUNCATED
    peaks,  # [n, blocks] fp32, from `summarise`
    sums,  # [n, blocks] fp32, from `summarise`
    token_ids,  # [n] int32, out; 0 if the row is not finite
    finite,  # [n] uint8, out: 1 if every logit of the row is finite
    stride,
    vocab,
    blocks,
    TRUNCATED: tl.constexpr,
    WIDTH: tl.constexpr,  # blocks, rounded up to a power of two
):
    """Draw a block of each row, then a token of it. Ties go to the lowest token id. Grid: ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    key_low, key_high = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
    greedy = scale == 0.0

    block_ids = tl.arange(0, WIDTH)
    real = block_ids < blocks
    peak = tl.load(peaks + row * blocks + block_ids, mask=real, other=float("-inf"))
    total = tl.load(sums + row * blocks + block_ids, mask=real, other=0.0)
    good = tl.sum((total != total).to(tl.int32)) == 0
    drawable = total > 0.0
    weight = tl.where(greedy, peak, peak * scale + tl.log(tl.where(drawable, total, 1.0)))
    noisy = weight + tl.where(greedy, 0.0, gumbel(key_low, key_high, -1 - block_ids))
    block = tl.argmax(tl.where(drawable, noisy, float("-inf")), axis=0)

    columns = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = columns < vocab
    values = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.where(greedy, values, values * scale)
    noisy = scaled + tl.where(greedy, 0.0, gumbel(key_low, key_high, columns))
    if TRUNCATED:
        inside = inside & (scaled >= tl.load(lowest + row))
    token = block * _BLOCK + tl.argmax(tl.where(inside, noisy, float("-inf")), axis=0)
    tl.store(token_ids + row, tl.where(good, token, 0).to(tl.int32))
    tl.store(finite + row, good.to(tl.uint8))


@triton.jit(do_not_specialize_on_alignment=["logprobs"])  # it is a slice of a larger array
def look_up(
    logits,  # [n, vocab] bf16, fp16 or fp32, rows `stride` apart
    rows,  # [programs] int32, rows of `logits` and `token_ids`
    token_ids,  # [n] int32
    peaks,  # [programs, blocks] fp32, from `summarise` with UNSCALED
    sums,  # [programs, blocks] fp32, from `summarise` with UNSCALED
    logprobs,  # [programs] fp32, out: log-probability of the row's token
    totals,  # [programs] fp32, out: the log-sum-exp of the row
    stride,
    blocks,
    WIDTH: tl.constexpr,
):
    """Write the log-probability of each row's token at temperature 1, as a natural logarithm. Grid: ``(programs,)``."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program).to(tl.int64)
    block_ids = tl.arange(0, WIDTH)
    real = block_ids < blocks
    peak = tl.load(peaks + program * blocks + block_ids, mask=real, other=float("-inf"))
    total = tl.load(sums + program * blocks + block_ids, mask=real, other=0.0)
    largest = tl.max(peak)
    everything = largest + tl.log(tl.sum(tl.where(real, total * tl.exp(peak - largest), 0.0)))
    value = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float32)
    tl.store(logprobs + program, value - everything)
    tl.store(totals + program, everything)
