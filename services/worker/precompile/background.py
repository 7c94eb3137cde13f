"""The child process that compiles kernels, for as long as a worker starts."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import structlog

from services.common.children import module_command, module_environment
from services.worker.precompile.job import Job

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def compiling_ahead(job: Job) -> Iterator[None]:
    """Have a child compile the kernels of ``job`` until the end of the context.

    Nothing waits for it: the worker finds in Triton's cache what is compiled when it needs it, and compiles the rest.
    A child that cannot be started or fails costs time, and changes nothing else.
    """
    command, environment = module_command("services.worker.precompile"), module_environment(os.environ)
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0)
    except OSError as error:
        log.warning("kernels are not compiled ahead", reason=str(error))
        yield
        return
    try:
        with contextlib.suppress(OSError), child.stdin as told:  # type: ignore[union-attr]  # it is a pipe
            told.write(job.model_dump_json().encode())
        yield
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # its own children, too, which wait for work
        child.wait()
