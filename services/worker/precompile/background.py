"""The child process that compiles kernels, for as long as a worker starts. No torch here."""

import contextlib
import os
import signal
import subprocess

import structlog

from services.common.children import module_command, module_environment
from services.worker.precompile.job import Job

log = structlog.get_logger(__name__)


class KernelCompiler:
    """A child that loads its libraries while the worker loads its own, waits for a job, and compiles its kernels.

    Nothing waits for the child: the worker finds in Triton's cache what is compiled when it needs it, and compiles the
    rest. A child that fails costs time, and changes nothing else. One that gets no job ends with the worker.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @classmethod
    def start(cls) -> "KernelCompiler | None":
        """Start the child. None, and a warning, where the system starts none."""
        command, environment = module_command("services.worker.precompile"), module_environment(os.environ)
        try:
            return cls(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0))
        except OSError as error:
            log.warning("kernels are not compiled ahead", reason=str(error))
            return None

    def compile(self, job: Job) -> None:
        """Give the child its only job."""
        with contextlib.suppress(OSError), self._child.stdin as told:  # type: ignore[union-attr]  # it is a pipe
            told.write(job.model_dump_json().encode())

    def close(self) -> None:
        """End the child and the processes that it started."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        with contextlib.suppress(OSError):
            self._child.stdin.close()  # type: ignore[union-attr]  # it is a pipe
