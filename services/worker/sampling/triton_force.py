"""Kernels for the forced tokens of thinking budgets, see ``thinking.py``, on float32 copies of rows with a budget."""

import triton
import triton.language as tl

from services.worker.step.slots import OPENING_TOKENS

_OPENING = tl.constexpr(OPENING_TOKENS)
_NOWHERE = tl.constexpr(2**30)


@triton.jit
def find_forced(
    values,  # [n, vocab] fp32
    rows,  # [programs] int32, rows of `values`
    slots,  # [programs] int32
    lengths,  # [programs] int32, tokens of the sequence
    prompts,  # [programs] int32, tokens of the prompt
    budgets,  # [programs] int32, tokens of the reasoning section
    begins,  # [programs] int32, the token that begins the section; -1 = the section begins at the end of the prompt
    ends,  # [programs] int32, the token that ends it
    forced,  # [programs] int32, out: the token to sample; -1 = not forced
    tokens,  # [pages, page_size] int32, the cache's token ids
    page_table,  # [slots, max_pages] int32
    max_pages,
    page_size,
    vocab,
    BLOCK: tl.constexpr,
):
    """Find the forced token of each row. Grid: ``(programs,)``."""
    program = tl.program_id(0)
    row = tl.load(rows + program).to(tl.int64)
    table = page_table + tl.load(slots + program).to(tl.int64) * max_pages
    length = tl.load(lengths + program)
    prompt = tl.load(prompts + program)
    begin = tl.load(begins + program)
    end = tl.load(ends + program)

    # These names differ from those in the loop, because Triton requires a name to keep its type in a loop.
    opening = prompt + tl.arange(0, _OPENING)
    generated = opening < length
    opening_page = tl.load(table + opening // page_size, mask=generated, other=0).to(tl.int64)
    opening_token = tl.load(tokens + opening_page * page_size + opening % page_size, mask=generated, other=-1)
    first = tl.min(tl.where(generated & (opening_token == begin), opening, _NOWHERE))
    start = tl.where(begin < 0, prompt, first + 1)

    found = tl.zeros((BLOCK,), tl.int32)
    for at in range(start, length, BLOCK):
        positions = at + tl.arange(0, BLOCK)
        inside = positions < length
        page = tl.load(table + positions // page_size, mask=inside, other=0).to(tl.int64)
        token = tl.load(tokens + page * page_size + positions % page_size, mask=inside, other=-1)
        found += (inside & (token == end)).to(tl.int32)
    allowed = tl.load(values + row * vocab + end) > float("-inf")
    due = (length - start >= tl.load(budgets + program)) & (tl.sum(found) == 0) & allowed
    tl.store(forced + program, tl.where(due, end, -1))


@triton.jit
def force(
    values,  # [n, vocab] fp32, in and out
    rows,  # [programs] int32, rows of `values`
    forced,  # [programs] int32, from `find_forced`
    vocab,
    BLOCK: tl.constexpr,
):
    """Set all logits of a row but that of its forced token to -inf. Grid: ``(programs, blocks of the vocabulary)``."""
    program = tl.program_id(0)
    row = tl.load(rows + program).to(tl.int64)
    token = tl.load(forced + program)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ruled_out = (columns < vocab) & (token >= 0) & (columns != token)
    tl.store(values + row * vocab + columns, float("-inf"), mask=ruled_out)
