"""Kernel for the masks of grammars, on float32 copies of the rows that have one."""

import triton
import triton.language as tl


@triton.jit
def rule_out(
    values,  # [n, vocab] fp32, in and out
    rows,  # [programs] int32, rows of `values`
    bits,  # [programs, words] int32: bit i of word w allows token 32 w + i
    words,
    vocab,
    BLOCK: tl.constexpr,
):
    """Set the logits of tokens that the masks do not allow to -inf. Grid: ``(programs, blocks of the vocabulary)``."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    word = tl.load(bits + program * words + columns // 32, mask=inside & (columns // 32 < words), other=0)
    allowed = (word >> (columns % 32)) & 1
    tl.store(values + row * vocab + columns, float("-inf"), mask=inside & (allowed == 0))
