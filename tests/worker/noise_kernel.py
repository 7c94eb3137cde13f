"""A kernel that writes the noise itself, for a test to look at."""

import triton
import triton.language as tl

from services.worker.sampling.triton_noise import gumbel


@triton.jit
def write_noise(keys, ids, out, SIZE: tl.constexpr):
    """``out [SIZE]`` fp32 for ``ids [SIZE]`` int32 and one row's ``keys [2]`` int32."""
    offsets = tl.arange(0, SIZE)
    tl.store(out + offsets, gumbel(tl.load(keys), tl.load(keys + 1), tl.load(ids + offsets)))
