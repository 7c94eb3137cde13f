"""Kernels that start while those before them end: programmatic dependent launch, from compute capability 9.0 on.

A kernel launched with ``overlapping`` starts as soon as every program of the kernel before has let it
(``gdc_launch_dependents``) or has ended. Until it waits for that kernel's end (``gdc_wait``) it may read only what no
kernel of its chain writes: weights, a step's inputs, tokens cached by earlier steps. Every program of it waits, also
one that has nothing to do: the kernels after it take its end for the end of all kernels before.
"""

from functools import cache

import torch
import triton
import triton.language as tl


def overlaps(device: torch.device) -> bool:
    """Whether kernels can overlap on ``device``."""
    return device.type == "cuda" and _capability(device.index or 0) >= (9, 0)


def overlapping(overlap: bool) -> dict[str, bool]:
    """What a launch says beside the kernel's arguments."""
    return {"launch_pdl": True} if overlap else {}


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@triton.jit
def load_in_place(pointers, inside):
    """``tl.load`` of 16 bits each, zeros outside, as float32, by the threads that will use them. What is loaded plainly
    is brought from the order that suits memory into theirs at once, and all that follows waits for it."""
    found = tl.inline_asm_elementwise(
        "{ .reg .pred asks; setp.ne.s32 asks, $2, 0; mov.b32 $0, 0; @asks ld.global.u16 $0, [$1]; }",
        "=r,l,r",
        [pointers.to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return found.to(tl.int16).to(pointers.dtype.element_ty, bitcast=True).to(tl.float32)
