"""Kernels into Triton's cache, without a device, on several processors."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import structlog
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from services.common import host
from services.worker.precompile.launches import Launch

_MOST_PROCESSES = 12  # more do not end sooner: one kernel takes 0.3 s, and there are fewer than a hundred
_PROCESS_BYTES = 1 << 30  # free memory for each process, of which it takes a third
_WARP_SIZE = 32

log = structlog.get_logger(__name__)

_launches: Sequence[Launch] = ()  # for the processes that are forked


class AbsentDriver:
    """Triton's driver of a GPU that is not used: kernels are compiled for it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, _WARP_SIZE)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def compile_all(launches: Sequence[Launch], capability: tuple[int, int]) -> int:
    """Compile ``launches``, in their order, for GPUs of ``capability``; return how many could be compiled.

    Call it in a process that has one thread, since it forks.
    """
    global _launches
    driver.set_active(AbsentDriver(capability))
    _launches = launches
    room = host.available_memory() // _PROCESS_BYTES
    processes = max(1, min(_MOST_PROCESSES, host.usable_processors(), room, len(launches)))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        reasons = [reason for reason in pool.map(_compile, range(len(launches))) if reason]
    if reasons:
        log.warning("kernels not compiled ahead", count=len(reasons), first=reasons[0])
    return len(launches) - len(reasons)


def _compile(index: int) -> str:
    """Why the launch of this index cannot be compiled; empty if it can."""
    try:
        compiled = _launches[index].compile()
        # Until Triton 3.7 each kind of arguments has a launcher in C, which gcc compiles.
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # of any kind: the worker compiles that kernel itself, and tells what is wrong
        return f"{_launches[index].kernel.__name__}: {error!r}"
    return ""
