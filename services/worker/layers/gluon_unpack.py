"""Conversion of packed integers to 16-bit floats, multiplied by their scales, for Gluon kernels.

Two neighbouring weights are converted together, as ``triton_unpack`` describes, and multiplied by a scale that has the
dtype of the rows. So a weight is rounded twice: as its scale, and as a product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from services.worker.layers.triton_unpack import (
    BF16,
    BF16_BYTES,
    BF16_E2M1,
    FLOATS,
    FP16,
    FP16_BYTES,
    HIGH,
    HIGH_FLOATS,
    LOW,
    LOW_FLOATS,
    TO_INTEGERS,
)

_SCALED = " mul.rn.{kind} $0, $0, $3; mul.rn.{kind} $1, $1, $4; }}"
_SHIFTED = " fma.rn.{kind} $0, $0, $3, $5; fma.rn.{kind} $1, $1, $4, $6; }}"


def _with_ends(start: str, values: dict[str, str]) -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX that begins with ``start``, without and with offsets."""
    return gl.constexpr((start + _SCALED).format(**values)), gl.constexpr((start + _SHIFTED).format(**values))


_BF16_LOW, _BF16_LOW_SHIFTED = _with_ends(TO_INTEGERS, BF16 | LOW)
_BF16_HIGH, _BF16_HIGH_SHIFTED = _with_ends(TO_INTEGERS, BF16 | HIGH)
_BF16_8, _BF16_8_SHIFTED = _with_ends(BF16_BYTES, BF16)
_LOW_FLOATS, _LOW_FLOATS_SHIFTED = _with_ends(FLOATS, BF16_E2M1 | LOW_FLOATS)
_HIGH_FLOATS, _HIGH_FLOATS_SHIFTED = _with_ends(FLOATS, BF16_E2M1 | HIGH_FLOATS)
_FP16_LOW, _FP16_LOW_SHIFTED = _with_ends(TO_INTEGERS, FP16 | LOW)
_FP16_HIGH, _FP16_HIGH_SHIFTED = _with_ends(TO_INTEGERS, FP16 | HIGH)
_FP16_8, _FP16_8_SHIFTED = _with_ends(TO_INTEGERS, FP16_BYTES)


@gluon.jit
def doubled(values, DTYPE: gl.constexpr):
    """Return each float32 value twice, as the halves of a uint32, in ``DTYPE``."""
    bits = values.to(DTYPE).to(gl.uint16, bitcast=True).to(gl.uint32)
    return bits | (bits << 16)


@gluon.jit
def weights_of_pairs(codes, scale, offset, HIGH: gl.constexpr, BITS: gl.constexpr, OFFSETS: gl.constexpr,
                     FLOATS: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Return the weights of ``codes [lines, pairs]`` int16, ``[lines, 2 * pairs]`` of ``DTYPE`` in ``LAYOUT``.

    With 4 bits, they are the low halves of the bytes, or the high ones with ``HIGH``. ``scale`` and ``offset`` are
    those of lines, as ``doubled`` returns them. ``FLOATS``: the weights are in MXFP4, and ``DTYPE`` is bfloat16. In
    ``LAYOUT``, a thread holds pairs of neighbours.
    """
    gl.static_assert(gl.bfloat16 == DTYPE or not FLOATS, "the scales of MXFP4 are powers of two in bfloat16")
    if BITS == 8:
        values = _run(codes, scale, offset, OFFSETS, _BF16_8, _BF16_8_SHIFTED, _FP16_8, _FP16_8_SHIFTED, DTYPE)
    elif FLOATS:
        PLAIN: gl.constexpr = _HIGH_FLOATS if HIGH else _LOW_FLOATS
        SHIFTED: gl.constexpr = _HIGH_FLOATS_SHIFTED if HIGH else _LOW_FLOATS_SHIFTED
        values = _run(codes, scale, offset, OFFSETS, PLAIN, SHIFTED, PLAIN, SHIFTED, DTYPE)
    elif HIGH:
        values = _run(codes, scale, offset, OFFSETS, _BF16_HIGH, _BF16_HIGH_SHIFTED, _FP16_HIGH, _FP16_HIGH_SHIFTED,
                      DTYPE)  # fmt: skip
    else:
        values = _run(codes, scale, offset, OFFSETS, _BF16_LOW, _BF16_LOW_SHIFTED, _FP16_LOW, _FP16_LOW_SHIFTED, DTYPE)
    first = (values & 0xFFFF).to(gl.uint16).to(DTYPE, bitcast=True)
    second = (values >> 16).to(gl.uint16).to(DTYPE, bitcast=True)
    joined = gl.join(first, second).reshape([codes.shape[0], codes.shape[1] * 2])
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit
def _run(codes, scale, offset, OFFSETS: gl.constexpr, BF16: gl.constexpr, BF16_SHIFTED: gl.constexpr,
         FP16: gl.constexpr, FP16_SHIFTED: gl.constexpr, DTYPE: gl.constexpr):  # fmt: skip
    """Run PTX on two pairs at a time, which writes its results before it reads scales. Return pairs as uint32."""
    scales = scale[:, None] + gl.zeros_like(codes).to(gl.uint32)
    if OFFSETS:
        offsets = offset[:, None] + gl.zeros_like(codes).to(gl.uint32)
        ASM: gl.constexpr = FP16_SHIFTED if gl.float16 == DTYPE else BF16_SHIFTED
        pairs = gl.inline_asm_elementwise(
            ASM, "=&r,=&r,r,r,r,r,r", [codes, scales, offsets], dtype=gl.uint32, is_pure=True, pack=2
        )
    else:
        PLAIN: gl.constexpr = FP16 if gl.float16 == DTYPE else BF16
        pairs = gl.inline_asm_elementwise(
            PLAIN, "=&r,=&r,r,r,r", [codes, scales], dtype=gl.uint32, is_pure=True, pack=2
        )
    return pairs
