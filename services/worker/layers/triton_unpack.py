"""Conversion of packed integers, and of floats of 4 and 8 bits, to 16-bit floats, for Triton kernels.

A byte becomes the low bits of a float whose exponent makes these bits its integer part: 128 to 143 in bfloat16, 1024 to
1279 in float16. One subtraction for two values then gives the signed integer exactly. A conversion instruction for each
value would take longer than reading the value from memory.

Sign, exponent and significand of a float of 4 bits (E2M1) or 8 bits (E4M3) are moved to the places that they have in a
16-bit float. The difference of the exponents' biases is then missing, so a product with a power of two gives the value
exactly.
"""

import triton
import triton.language as tl

# Conversions without their ends, so that more can follow. ``gluon_unpack`` uses them too.
TO_INTEGERS = (
    "{{ .reg .b32 halves, exponent, one, middle;"
    " {select}"
    " mov.b32 exponent, {exponent}; mov.b32 one, {one}; mov.b32 middle, {middle};"
    " prmt.b32 $0, halves, exponent, 0x4140; prmt.b32 $1, halves, exponent, 0x4342;"
    " fma.rn.{kind} $0, $0, one, middle; fma.rn.{kind} $1, $1, one, middle;"
)
LOW = {"select": "and.b32 halves, $2, 0x0F0F0F0F;"}
HIGH = {"select": "shr.b32 halves, $2, 4; and.b32 halves, halves, 0x0F0F0F0F;"}
BF16 = {"kind": "bf16x2", "exponent": "0x43434343", "one": "0x3F803F80", "middle": "0xC308C308"}
FP16 = {"kind": "f16x2", "exponent": "0x64646464", "one": "0x3C003C00", "middle": "0xE408E408"}
FP16_BYTES = FP16 | {"select": "mov.b32 halves, $2;", "middle": "0xE480E480"}
_INTEGERS = TO_INTEGERS + " }}"
_BF16_LOW = tl.constexpr(_INTEGERS.format(**BF16, **LOW))
_BF16_HIGH = tl.constexpr(_INTEGERS.format(**BF16, **HIGH))
_FP16_LOW = tl.constexpr(_INTEGERS.format(**FP16, **LOW))
_FP16_HIGH = tl.constexpr(_INTEGERS.format(**FP16, **HIGH))
_FP16_BYTES = tl.constexpr(_INTEGERS.format(**FP16_BYTES))
# As ``TO_INTEGERS``, for bytes. The significand of bfloat16 has room for seven bits of a code. The eighth bit decides
# what is subtracted: 128 or 256.
BF16_BYTES = (
    "{{ .reg .b32 a, b, c, d, minus; mov.b32 minus, 0xBF80BF80;"
    " prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
    " lop3.b32 c, a, 0x00800080, 0x43004300, 0xAE; lop3.b32 d, b, 0x00800080, 0x43004300, 0xAE;"
    " lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;"
    " fma.rn.bf16x2 $0, c, minus, a; fma.rn.bf16x2 $1, d, minus, b;"
)
_BF16_BYTES = tl.constexpr((BF16_BYTES + " }}").format())
FLOATS = (
    "{{ .reg .b32 bytes, lanes, signs, none, power, zero;"
    " mov.b32 bytes, $2; mov.b32 none, 0; mov.b32 power, {power}; mov.b32 zero, 0x80008000;"
    " prmt.b32 lanes, bytes, none, 0x1404; shl.b32 signs, lanes, {signs}; {shift}"
    " and.b32 signs, signs, 0x80008000; and.b32 lanes, lanes, {places}; or.b32 lanes, lanes, signs;"
    " fma.rn.{kind} $0, lanes, power, zero;"
    " prmt.b32 lanes, bytes, none, 0x3424; shl.b32 signs, lanes, {signs}; {shift}"
    " and.b32 signs, signs, 0x80008000; and.b32 lanes, lanes, {places}; or.b32 lanes, lanes, signs;"
    " fma.rn.{kind} $1, lanes, power, zero;"
)
_WHOLE_FLOATS = FLOATS + " }}"
BF16_E2M1 = {"kind": "bf16x2", "power": "0x7E807E80", "places": "0x01C001C0"}  # 2 to the power of 126
LOW_FLOATS = {"signs": "4", "shift": "shr.b32 lanes, lanes, 2;"}  # in bfloat16
HIGH_FLOATS = {"signs": "0", "shift": "shr.b32 lanes, lanes, 6;"}
_FP16_E2M1 = {"kind": "f16x2", "power": "0x74007400", "places": "0x0E000E00"}  # 2 to the power of 14
_BF16_LOW_FLOATS = tl.constexpr(_WHOLE_FLOATS.format(**BF16_E2M1, **LOW_FLOATS))
_BF16_HIGH_FLOATS = tl.constexpr(_WHOLE_FLOATS.format(**BF16_E2M1, **HIGH_FLOATS))
_FP16_LOW_FLOATS = tl.constexpr(_WHOLE_FLOATS.format(signs=4, shift="shl.b32 lanes, lanes, 1;", **_FP16_E2M1))
_FP16_HIGH_FLOATS = tl.constexpr(_WHOLE_FLOATS.format(signs=0, shift="shr.b32 lanes, lanes, 3;", **_FP16_E2M1))
_BF16_E4M3 = {"kind": "bf16x2", "power": "0x7B807B80", "places": "0x07F007F0"}  # 2 to the power of 120
_FP16_E4M3 = {"kind": "f16x2", "power": "0x5C005C00", "places": "0x3F803F80"}  # 2 to the power of 8
_BF16_BYTE_FLOATS = tl.constexpr(_WHOLE_FLOATS.format(signs=0, shift="shr.b32 lanes, lanes, 4;", **_BF16_E4M3))
_FP16_BYTE_FLOATS = tl.constexpr(_WHOLE_FLOATS.format(signs=0, shift="shr.b32 lanes, lanes, 1;", **_FP16_E4M3))
_BF16_ONES = tl.constexpr("{ mov.b32 $0, 0x3F803F80; mov.b32 $1, 0x3F803F80; }")
_FP16_ONES = tl.constexpr("{ mov.b32 $0, 0x3C003C00; mov.b32 $1, 0x3C003C00; }")


@triton.jit
def _run(codes, BF16: tl.constexpr, FP16: tl.constexpr, DTYPE: tl.constexpr):
    """Run PTX on four bytes at a time."""
    if DTYPE.is_fp16():
        values = tl.inline_asm_elementwise(FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        values = tl.inline_asm_elementwise(BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return values


@triton.jit
def low_halves(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the low four bits of each byte minus 8, as ``DTYPE``, bfloat16 or float16. ``ASM``: use PTX."""
    return _run(codes, _BF16_LOW, _FP16_LOW, DTYPE) if ASM else ((codes & 15).to(tl.int32) - 8).to(DTYPE)


@triton.jit
def high_halves(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the high four bits of each byte minus 8, as ``low_halves`` does."""
    return _run(codes, _BF16_HIGH, _FP16_HIGH, DTYPE) if ASM else ((codes >> 4).to(tl.int32) - 8).to(DTYPE)


@triton.jit
def whole_bytes(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return each byte minus 128, as ``low_halves`` does."""
    return _run(codes, _BF16_BYTES, _FP16_BYTES, DTYPE) if ASM else (codes.to(tl.int32) - 128).to(DTYPE)


@triton.jit
def _float(codes, DTYPE: tl.constexpr):
    """Return the floats of ``codes`` from 0 to 15. Four times a float is an integer."""
    exponent, significand = (codes >> 1) & 3, (codes & 1).to(tl.int32)
    size = tl.where(exponent == 0, 2 * significand, (2 + significand) << exponent.to(tl.int32))
    return (tl.where(codes >= 8, -size, size).to(tl.float32) / 4).to(DTYPE)


@triton.jit
def low_floats(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the floats of the low four bits of each byte, as ``low_halves`` does."""
    return _run(codes, _BF16_LOW_FLOATS, _FP16_LOW_FLOATS, DTYPE) if ASM else _float(codes & 15, DTYPE)


@triton.jit
def high_floats(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the floats of the high four bits of each byte, as ``low_halves`` does."""
    return _run(codes, _BF16_HIGH_FLOATS, _FP16_HIGH_FLOATS, DTYPE) if ASM else _float(codes >> 4, DTYPE)


@triton.jit
def byte_floats(values, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return floats of 8 bits (E4M3, none of them NaN) as ``low_halves`` does."""
    codes = values.to(tl.uint8, bitcast=True)
    return _run(codes, _BF16_BYTE_FLOATS, _FP16_BYTE_FLOATS, DTYPE) if ASM else values.to(DTYPE)


@triton.jit
def ones_like(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return a one for each byte, as ``low_halves`` does.

    With PTX, the compiler gives the result the layout of converted codes, which a constant would not have.
    """
    return _run(codes, _BF16_ONES, _FP16_ONES, DTYPE) if ASM else tl.full(codes.shape, 1.0, DTYPE)
