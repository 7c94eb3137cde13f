"""Sizes and parts of kernels that the products of a few rows, ``triton_skinny`` and ``triton_grouped``, share."""

import triton
import triton.language as tl

SMALLEST_DOT = 8  # the smallest number of rows of a product on tensor cores


def padded_rows(rows: int) -> int:
    """Return ``rows`` rounded up to a power of two, at least 8, as the tensor cores need."""
    return max(SMALLEST_DOT, 1 << (rows - 1).bit_length())


def stage_bytes(rows: int, outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of a pipeline stage: ``outputs * inputs`` weights of ``bits``, and 16-bit inputs of all rows."""
    return (outputs * bits // 8 + 2 * padded_rows(rows)) * inputs


@triton.jit
def weight_rows(program, BLOCK_OUT: tl.constexpr, RESULTS: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr):
    """Return the ``BLOCK_OUT`` weight rows of a program. If ``GATED``, rows of gate and up alternate."""
    lines = tl.arange(0, BLOCK_OUT)
    if GATED:
        return tl.minimum(program * RESULTS + lines // 2, SIZE - 1) + (lines % 2) * SIZE
    else:
        return tl.minimum(program * RESULTS + lines, SIZE - 1)


@triton.jit
def load_squares(squares, members, rows, PARTS: tl.constexpr):
    """Load the squares of a prepared input, ``[parts, rows]``. There are ``PARTS`` parts, and the others are 0."""
    PADDED: tl.constexpr = triton.next_power_of_2(PARTS)
    indices = tl.arange(0, PADDED)
    inside = (indices < PARTS)[:, None] & (members < rows)[None, :]
    return tl.load(squares + indices[:, None] * rows + members[None, :], inside, other=0.0)


@triton.jit
def gate_pairs(total, dtype: tl.constexpr, RESULTS: tl.constexpr, ROWS: tl.constexpr):
    """Return ``silu(gate) * up`` for rows of gate and up that alternate in ``total``."""
    # A separate kernel for the gate would round here too.
    pairs = tl.permute(tl.reshape(total.to(dtype), (RESULTS, 2, ROWS)), (0, 2, 1))
    gate, up = tl.split(pairs)
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def store_prepared(result, offsets, kept, scale, values, squares, program, members, rows):
    """Store ``result`` as the input of a product after a norm, see ``NormInput``, and the sum of its squares."""
    wide = tl.where(kept, result.to(tl.float32), 0.0)
    tl.store(values + offsets, (wide * scale[:, None]).to(result.dtype), kept)
    tl.store(squares + program * rows + members, tl.sum(wide * wide, axis=0), members < rows)
