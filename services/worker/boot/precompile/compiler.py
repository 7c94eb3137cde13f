"""Compilation of kernels into Triton's cache, without a device, by several processes."""

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import structlog
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from services.common.boundaries import errors_to
from services.common.host import resources as host
from services.common.process.service import PARENT_PID, exit_with_parent
from services.worker.boot.precompile.launches import Launch

_MOST_PROCESSES = 12  # more finish no sooner: a kernel takes 0.3 s, and there are fewer than a hundred
_PROCESS_BYTES = 1 << 30  # free memory for each process, which uses a third of it
_WARP_SIZE = 32

log = structlog.get_logger(__name__)


class AbsentDriver:
    """A Triton driver for a GPU that may be absent: kernels are compiled for it, and never launched."""

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
    """Processes that compile launches for GPUs of ``capability`` while this process finds more launches.

    Create it in a process that has one thread, since it forks.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        driver.set_active(AbsentDriver(capability))
        room = host.available_memory() // _PROCESS_BYTES
        processes = max(1, min(_MOST_PROCESSES, host.usable_processors(), room))
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), _exit_with_parent, (os.getpid(),)
        )
        self._pool.submit(int)  # the first task forks all processes, while there is one thread
        self._failures: list[Future[str]] = []

    def compile(self, launch: Launch) -> None:
        """Queue ``launch`` for compilation, behind earlier launches."""
        self._failures.append(self._pool.submit(_compile, launch))

    def close(self) -> int:
        """Wait until all launches are compiled. Return how many could be."""
        with self._pool:
            reasons = [reason for failure in self._failures if (reason := failure.result())]
        if reasons:
            log.warning("kernels not compiled ahead", count=len(reasons), first=reasons[0])
        return len(self._failures) - len(reasons)


def _exit_with_parent(parent: int) -> None:
    """Make this process of the pool exit when ``parent`` exits. Otherwise it would wait for tasks for ever."""
    os.environ[PARENT_PID] = str(parent)
    exit_with_parent()


def _compile(launch: Launch) -> str:
    """Compile ``launch``. Return why it cannot be compiled, or an empty string."""
    errors: list[Exception] = []
    with errors_to(errors.append):  # the worker will compile this kernel itself, and report the error
        compiled = launch.compile()
        # Before Triton 3.7, each specialisation has a launcher in C, which gcc compiles.
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
    return f"{launch.kernel.__name__}: {errors[0]!r}" if errors else ""
