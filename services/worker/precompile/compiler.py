"""Kernels into Triton's cache, without a device, on several processors."""

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
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


class CompilerPool:
    """Processes that compile launches for GPUs of ``capability`` while this process finds more of them.

    Make it in a process that has one thread, since it forks.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        driver.set_active(AbsentDriver(capability))
        room = host.available_memory() // _PROCESS_BYTES
        processes = max(1, min(_MOST_PROCESSES, host.usable_processors(), room))
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"))
        self._pool.submit(int)  # forks now
        self._reasons: list[Future[str]] = []

    def compile(self, launch: Launch) -> None:
        """Have ``launch`` compiled, after those that were given before."""
        self._reasons.append(self._pool.submit(_compile, launch))

    def close(self) -> int:
        """Wait for all launches. Return how many could be compiled."""
        with self._pool:
            reasons = [reason for each in self._reasons if (reason := each.result())]
        if reasons:
            log.warning("kernels not compiled ahead", count=len(reasons), first=reasons[0])
        return len(self._reasons) - len(reasons)


def _compile(launch: Launch) -> str:
    """Return why ``launch`` cannot be compiled; empty if it can."""
    try:
        compiled = launch.compile()
        # Until Triton 3.7 each kind of arguments has a launcher in C, which gcc compiles.
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # of any kind: the worker compiles that kernel itself, and tells what is wrong
        return f"{launch.kernel.__name__}: {error!r}"
    return ""
