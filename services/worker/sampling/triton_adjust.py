"""Kernels for bias and penalties, on float32 copies of the rows that have them.

The copies are float32 because bf16 logits would round away a small penalty.
"""

import triton
import triton.language as tl

# Bit that is set if the prompt contains the token. The bits below count how often the token was generated.
_IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["entries"])  # otherwise some numbers of entries compile another variant
def add_bias(
    values,  # [n, vocab] fp32, in and out
    rows,  # [entries] int32
    token_ids,  # [entries] int32; a pair of row and token may occur more than once
    biases,  # [entries] fp32
    entries,
    vocab,
    BLOCK: tl.constexpr,
):
    """Add each bias to its logit. Grid: blocks of ``BLOCK`` entries."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < entries
    row = tl.load(rows + offsets, mask=inside, other=0).to(tl.int64)
    token = tl.load(token_ids + offsets, mask=inside, other=0)
    tl.atomic_add(values + row * vocab + token, tl.load(biases + offsets, mask=inside, other=0.0), mask=inside)


@triton.jit
def count_tokens(
    counts,  # [n, vocab] int32, in and out; zero at the start
    slots,  # [n] int32
    lengths,  # [n] int32, tokens of the sequence; 0 = the row has no penalties
    prompts,  # [n] int32, tokens of the prompt
    tokens,  # [pages, page_size] int32, the cache's token ids
    page_table,  # [slots, max_pages] int32
    max_pages,
    page_size,
    vocab,
    BLOCK: tl.constexpr,
):
    """Count the tokens of each sequence. Grid: ``(n, programs)``; the programs of a row divide its tokens."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(lengths + row)
    prompt = tl.load(prompts + row)
    for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        positions = start + tl.arange(0, BLOCK)
        inside = positions < length
        page = tl.load(page_table + slot * max_pages + positions // page_size, mask=inside, other=0).to(tl.int64)
        token = tl.load(tokens + page * page_size + positions % page_size, mask=inside, other=0)
        target = counts + row * vocab + token
        tl.atomic_or(target, _IN_PROMPT, mask=inside & (positions < prompt))
        tl.atomic_add(target, 1, mask=inside & (positions >= prompt))


@triton.jit
def penalise(
    values,  # [n, vocab] fp32, in and out
    counts,  # [n, vocab] int32, from `count_tokens`
    penalties,  # [n, 3] fp32: repetition (1 = off), frequency (0 = off), presence (0 = off)
    vocab,
    BLOCK: tl.constexpr,
):
    """Apply repetition, then frequency, then presence penalties. Grid: ``(n, blocks of the vocabulary)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    count = tl.load(counts + row * vocab + columns, mask=inside, other=0)
    value = tl.load(values + row * vocab + columns, mask=inside, other=0.0)
    factor, frequency = tl.load(penalties + row * 3), tl.load(penalties + row * 3 + 1)
    presence = tl.load(penalties + row * 3 + 2)
    generated = count & (_IN_PROMPT - 1)
    value = tl.where(count == 0, value, tl.where(value > 0.0, value / factor, value * factor))
    value -= frequency * generated.to(tl.float32)
    value -= tl.where(generated > 0, presence, 0.0)
    tl.store(values + row * vocab + columns, value, mask=inside)
