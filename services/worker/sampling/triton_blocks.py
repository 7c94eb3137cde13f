"""Kernel that reads the logits once and writes the maximum and the sum of exponentials of each block.

These summaries have 1/512 of the logits' size and are all that a draw needs to choose a block. No other sampling kernel
reads all logits of all rows, so this one is optimised for memory bandwidth: one warp per block, 16-byte loads, and no
data shared between warps.
"""

import triton
import triton.language as tl

from services.worker.step.noise import NOISE_BLOCK

_BLOCK = tl.constexpr(NOISE_BLOCK)
_LOG2E = tl.constexpr(1.4426950408889634)
# Maximum number of blocks that one program processes in sequence: 32 KiB of bf16 logits.
_MOST_BLOCKS = 16
# With few rows, a program processes fewer blocks, so that this number of programs keeps all multiprocessors busy.
_PROGRAMS = 16 * 132


def blocks_per_program(rows: int, blocks: int) -> int:
    """Return the number of blocks per program for ``summarise`` of ``rows`` rows of ``blocks`` blocks."""
    return max(1, min(_MOST_BLOCKS, rows * blocks // _PROGRAMS))


@triton.jit(do_not_specialize=["per_program"])
def summarise(
    logits,  # [n, vocab] bf16, fp16 or fp32, rows `stride` apart
    rows,  # [programs] int32, rows of `logits` and `scales`; unused unless MAPPED
    scales,  # [n] fp32, one over the temperature; 0 = greedy
    lowest,  # [programs] fp32, scaled logits below it are left out; unused unless TRUNCATED
    peaks,  # [n, blocks] fp32, out (in and out when TRUNCATED): the largest logit of each block, unscaled
    sums,  # [n, blocks] fp32, as peaks: the sum of exp(scale * (logit - peak)); NaN if a logit is not finite
    stride,
    vocab,
    blocks,
    per_program,
    MAPPED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    UNSCALED: tl.constexpr,  # use a scale of 1 for all rows
    MASKED: tl.constexpr = False,  # a logit of -inf is a token that cannot be drawn; otherwise it counts as not finite
):
    """Write ``peaks`` and ``sums`` of each block. Grid: ``(rows, ceil(blocks / per_program))``.

    With ``MAPPED`` and ``TRUNCATED``, the output row is the mapped row. With ``MAPPED`` alone, it is the program's row.
    """
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program).to(tl.int64) if MAPPED else program
    target = row if TRUNCATED else program
    scale = 1.0 if UNSCALED else tl.load(scales + row)
    bound = tl.load(lowest + program) if TRUNCATED else 0.0
    first = tl.program_id(1) * per_program
    offsets = tl.arange(0, _BLOCK)
    for block in range(first, tl.minimum(first + per_program, blocks)):
        index = target * blocks + block
        if TRUNCATED:
            peak = tl.load(peaks + index)
            total = tl.load(sums + index)
            if total == total:  # NaN marks a block that is not finite and is kept
                empty = peak * scale < bound
                if MASKED:
                    empty = empty | (total == 0.0)
                if empty:
                    tl.store(peaks + index, float("-inf"))
                    tl.store(sums + index, 0.0)
                else:
                    columns = block * _BLOCK + offsets
                    values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
                    values = values.to(tl.float32)
                    powers = tl.exp2((values - peak) * (scale * _LOG2E))
                    tl.store(sums + index, tl.sum(tl.where(values * scale < bound, 0.0, powers)))
        else:
            columns = block * _BLOCK + offsets
            inside = columns < vocab
            values = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
            # Columns beyond the vocabulary must not be the maximum and must add nothing to the sum. Without MASKED they
            # must be finite, so a large negative number replaces -inf.
            values = tl.where(inside, values, float("-inf") if MASKED else -1e30)
            peak = tl.max(values)
            base = peak
            if MASKED:
                base = tl.where(peak == float("-inf"), 0.0, peak)
            below = (values - base) * (scale * _LOG2E)
            # Adding zero times the difference turns a logit of -inf into NaN, so no second pass is needed to detect it.
            powers = tl.exp2(below) + below * 0.0
            if MASKED:
                powers = tl.where(values == float("-inf"), 0.0, powers)
            tl.store(sums + index, tl.sum(powers))
            tl.store(peaks + index, peak)
