"""Programmatic dependent launch, which lets a kernel start while the kernel before it ends.

It needs compute capability 9.0. A kernel launched with ``overlapping`` starts when each program of the kernel before
has called ``gdc_launch_dependents`` or ended. ``gdc_wait`` blocks until the kernel before has ended. Before this call a
kernel may read only memory that no kernel of its chain writes: weights, inputs of the step, and tokens cached by
earlier steps. All its programs must call ``gdc_wait``, even those without work, because later kernels rely on the end
of a kernel to imply the end of all kernels before it.
"""

import torch
import triton
import triton.language as tl

from services.worker.layers.cuda_devices import capability

_FIRST_CAPABILITY = (9, 0)


def overlaps(device: torch.device) -> bool:
    """Return whether ``device`` supports programmatic dependent launch."""
    return capability(device) >= _FIRST_CAPABILITY


def overlapping(overlap: bool) -> dict[str, bool]:
    """Return the launch options of a kernel that may start early if ``overlap`` is true."""
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def load_in_place(pointers, inside):
    """Load 16-bit values as float32 in the layout in which they are used, with zeros outside of ``inside``.

    Triton's ``tl.load`` loads in a coalesced layout and converts it at once, which blocks the program until the values
    have arrived.
    """
    bits = tl.inline_asm_elementwise(
        "{ .reg .pred asks; setp.ne.s32 asks, $2, 0; mov.b32 $0, 0; @asks ld.global.u16 $0, [$1]; }",
        "=r,l,r",
        [pointers.to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return bits.to(tl.int16).to(pointers.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def load_float_in_place(pointers, IN_PLACE: tl.constexpr):
    """Load float32 values that the kernel does not write, with ``IN_PLACE`` in the layout in which they are used.

    The compiler may load them at any time, also before ``gdc_wait``.
    """
    if not IN_PLACE:
        return tl.load(pointers)
    return tl.inline_asm_elementwise(
        "ld.global.f32 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def load_early(pointers, inside, OVERLAP: tl.constexpr):
    """Load values as float32 without blocking the program, if kernels overlap."""
    return load_in_place(pointers, inside) if OVERLAP else tl.load(pointers, inside, other=0.0).to(tl.float32)
