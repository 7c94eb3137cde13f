"""Properties of CUDA devices on which kernels and their options depend."""

from functools import cache

import torch

_HOPPER = 9  # major compute capability
_H200 = 132  # multiprocessors
# The largest shared memory of a program in KiB, by compute capability. Other GPUs have that of the smallest.
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_SMALLEST_SHARED = 99
_RESERVED = 8 << 10  # bytes of shared memory for what a program stores beside the stages of its pipeline
_PROGRAM = 1 << 10  # bytes of shared memory that CUDA reserves for each program
_MOST_RESIDENT = 3  # programs of a multiprocessor, for ``even_stages``


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


def shared_memory(device: torch.device) -> int:
    """Return the largest shared memory of a program in bytes, or that of an H200 for a device that is no GPU.

    A multiprocessor has 1 KiB more, or some GPUs a few.
    """
    known = capability(device)
    return _SHARED[_HOPPER, 0] << 10 if known == (0, 0) else _SHARED.get(known, _SMALLEST_SHARED) << 10


def fitting_stages(device: torch.device, stage: int, stages: int) -> int:
    """Return ``stages``, Triton's ``num_stages``, or fewer if they do not fit into the shared memory of ``device``.

    ``stage`` is the size of a stage in bytes. A pipeline stores one stage fewer than it has.
    """
    return max(1, min(stages, (shared_memory(device) - _RESERVED) // stage + 1))


def even_stages(device: torch.device, programs: int, stage: int) -> int | None:
    """Return Triton's ``num_stages`` with which a multiprocessor has room for its average of ``programs`` and no more.

    ``stage`` is the size of a stage in bytes. Programs start while those of the kernel before still run on some
    multiprocessors. If there were more room, the others would take more than the average, and the kernel would take
    longer. Returns None if the average, rounded up, is above 3: such a kernel runs longer than its start.
    """
    resident = -(-programs // multiprocessors(device))
    if resident > _MOST_RESIDENT:
        return None
    # One program takes just more than half, so that programs of the next kernel have room.
    shares = max(2, resident)
    stored = ((shared_memory(device) + _PROGRAM) // shares - _PROGRAM) // stage + (resident == 1)
    return max(2, stored + 1)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
