"""One pass over the logits: the largest of every block and the sum of its exponentials.

All that a draw needs of the vocabulary, in 1/512 of its size. The only kernel here that reads all logits of all rows,
so it is written for memory: one warp a block, 16-byte loads, nothing shared between warps.
"""

import triton
import triton.language as tl

from services.worker.step.noise import NOISE_BLOCK

_BLOCK = tl.constexpr(NOISE_BLOCK)
_LOG2E = tl.constexpr(1.4426950408889634)
# At most so many blocks go through one program, one after the other: 32 KiB of bf16 logits.
_MOST_BLOCKS = 16
# Fewer where rows are few, for so many programs: enough to keep every multiprocessor of the chips we know busy.
_PROGRAMS = 16 * 132


def blocks_per_program(rows: int, blocks: int) -> int:
    """For ``summarise`` of ``rows`` rows of ``blocks`` blocks."""
    return max(1, min(_MOST_BLOCKS, rows * blocks // _PROGRAMS))


@triton.jit(do_not_specialize=["per_program"])
def summarise(
    logits,  # [n, vocab] bf16, fp16 or fp32, rows `stride` apart
    rows,  # [programs] int32, rows of `logits` and `scales`; unused unless MAPPED
    scales,  # [n] fp32, one over the temperature; 0 = greedy
    lowest,  # [programs] fp32, scaled logits below it do not count; unused unless TRUNCATED
    peaks,  # [n, blocks] fp32, out (in and out when TRUNCATED): the largest logit of each block, unscaled
    sums,  # beside peaks: the sum of exp(scale * (logit - peak)); NaN when any logit of the block is not finite
    stride,
    vocab,
    blocks,
    per_program,
    MAPPED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    UNSCALED: tl.constexpr,  # as if every scale were 1
    MASKED: tl.constexpr = False,  # a logit of minus infinity cannot be drawn; else it is one that is not finite
):
    """Grid ``(rows, programs that go through per_program blocks each)``. With ``MAPPED`` and ``TRUNCATED``, ``peaks``
    and ``sums`` are those of the mapped row; with ``MAPPED`` alone, of the program's own."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program).to(tl.int64) if MAPPED else program
    target = row if TRUNCATED else program
    scale = 1.0 if UNSCALED else tl.load(scales + row)
    bound = tl.load(lowest + program) if TRUNCATED else 0.0
    first = tl.program_id(1) * per_program
    offsets = tl.arange(0, _BLOCK)
    for block in range(first, tl.minimum(first + per_program, blocks)):
        place = target * blocks + block
        if TRUNCATED:
            peak = tl.load(peaks + place)
            total = tl.load(sums + place)
            if total == total:  # what is not finite stays so
                nothing = peak * scale < bound
                if MASKED:
                    nothing = nothing | (total == 0.0)
                if nothing:
                    tl.store(peaks + place, float("-inf"))
                    tl.store(sums + place, 0.0)
                else:
                    columns = block * _BLOCK + offsets
                    values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
                    values = values.to(tl.float32)
                    powers = tl.exp2((values - peak) * (scale * _LOG2E))
                    tl.store(sums + place, tl.sum(tl.where(values * scale < bound, 0.0, powers)))
        else:
            columns = block * _BLOCK + offsets
            inside = columns < vocab
            values = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
            # Columns beyond the vocabulary are never the largest and add nothing. Unless masked rows are allowed, they
            # must be finite, which this number is in float32 only.
            values = tl.where(inside, values, float("-inf") if MASKED else -1e30)
            peak = tl.max(values)
            base = peak
            if MASKED:
                base = tl.where(peak == float("-inf"), 0.0, peak)
            below = (values - base) * (scale * _LOG2E)
            # Zero times minus infinity is not a number: so a logit of minus infinity is seen without a pass of its own.
            powers = tl.exp2(below) + below * 0.0
            if MASKED:
                powers = tl.where(values == float("-inf"), 0.0, powers)
            tl.store(sums + place, tl.sum(powers))
            tl.store(peaks + place, peak)
