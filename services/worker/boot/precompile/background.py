"""The child process that compiles kernels while a worker starts. This module does not import torch."""

import contextlib
import os
import signal
import subprocess

import structlog

from services.common.config import WorkerConfig
from services.common.host.resources import has_gpus
from services.common.process.children import module_command, module_environment
from services.common.process.service import PARENT_PID
from services.worker.boot.precompile.job import Job

log = structlog.get_logger(__name__)


class KernelCompiler:
    """A child process that compiles the kernels of one job.

    The child loads its libraries while the worker loads its own, and then waits for the job. The worker never waits for
    the child: it reads from Triton's cache the kernels that are compiled by then, and compiles the others itself. A
    child that fails costs time and changes nothing else. The child and its processes exit with the worker.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @classmethod
    def start(cls) -> "KernelCompiler | None":
        """Start the child. If the system cannot start it, log a warning and return None."""
        command = module_command("services.worker.boot.precompile")
        environment = module_environment(os.environ) | {PARENT_PID: str(os.getpid())}
        try:
            return cls(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0))
        except OSError as error:
            log.warning("kernels are not compiled ahead", reason=str(error))
            return None

    def compile(self, job: Job) -> None:
        """Send the child its only job."""
        with contextlib.suppress(OSError), self._child.stdin as stdin:  # type: ignore[union-attr]  # it is a pipe
            stdin.write(job.model_dump_json().encode())

    def close(self) -> None:
        """Kill the child and the processes that it started."""
        if self._child.returncode is None:  # not reaped yet, so its process group id is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        with contextlib.suppress(OSError):
            self._child.stdin.close()  # type: ignore[union-attr]  # it is a pipe


def can_precompile(config: WorkerConfig) -> bool:
    """Return whether this worker starts a ``KernelCompiler``, for all ranks of its stage.

    It is not useful with torch.compile, which makes other kernels. The stages of a pipeline cannot be rehearsed alone.
    """
    uses_gpu = config.device == "cuda" or (config.device == "auto" and has_gpus())
    return uses_gpu and config.torch_compile is not True and config.tp_rank == 0 and config.pp_size == 1
