"""Properties of CUDA devices on which kernels and their options depend."""

from functools import cache

import torch

_HOPPER = 9  # major compute capability
_H200 = 132  # multiprocessors
# The largest shared memory of a program in KiB, by compute capability. Other GPUs have that of the smallest.
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_SMALLEST_SHARED = 99
_RESERVED = 8 << 10  # bytes of shared memory for what a program stores beside the stages of its pipeline


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of ``device``, or (0, 0) if it is no CUDA device."""
    return _capability(device.index or 0) if device.type == "cuda" else (0, 0)


def takes_ptx(device: torch.device) -> bool:
    """Return whether kernels for ``device`` may contain PTX. Triton's interpreter, on CPUs, does not run it."""
    return device.type != "cpu"


def is_hopper(device: torch.device) -> bool:
    """Return whether ``device`` has the tensor cores of Hopper, which later GPUs do not have."""
    return capability(device)[0] == _HOPPER


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of ``device``, or that of an H200 for a device that is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _H200


def fitting_stages(device: torch.device, stage: int, stages: int) -> int:
    """Return ``stages``, Triton's ``num_stages``, or fewer if they do not fit into the shared memory of ``device``.

    ``stage`` is the size of a stage in bytes. A pipeline stores one stage fewer than it has.
    """
    known = capability(device)
    if known == (0, 0):
        return stages
    most = (_SHARED.get(known, _SMALLEST_SHARED) << 10) - _RESERVED
    return max(1, min(stages, most // stage + 1))


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
