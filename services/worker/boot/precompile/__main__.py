"""``python -m services.worker.boot.precompile``: compile the kernels that a worker will launch.

The ``Job`` is read from standard input.
"""

import sys
import time
from concurrent.futures.process import BrokenProcessPool

import structlog

from services.common.process.log import configure
from services.common.process.service import exit_with_parent
from services.worker.boot.caches import keep_compiled_code_in
from services.worker.boot.precompile.job import Job

log = structlog.get_logger(__name__)


def main() -> None:
    """Wait for the job, compile its kernels, and log their number. Without a job, do nothing."""
    exit_with_parent()  # before torch is loaded, which takes seconds
    from services.worker.boot.precompile.compiler import CompilerPool
    from services.worker.boot.precompile.dry_rehearsal import rehearse_dry

    received = sys.stdin.buffer.read()
    if not received:
        return
    job = Job.model_validate_json(received)
    configure("worker", "ERROR", job.config.log_format)  # the worker also warns about the directory
    keep_compiled_code_in(job.config.compile_cache_dir)
    configure("worker", "WARNING", job.config.log_format)  # the worker also logs the phases of the start
    started = time.monotonic()
    try:
        pool = CompilerPool(job.gpu.capability)
        rehearse_dry(job, pool.compile)
        rehearsed = time.monotonic()
        compiled = pool.close()
    except BrokenProcessPool:
        log.warning("kernels are not compiled ahead", reason="a process that compiled them was killed")
        sys.exit(1)
    configure("worker", job.config.log_level, job.config.log_format)
    log.info(
        "kernels compiled ahead",
        kernels=compiled,
        rehearsal_s=round(rehearsed - started, 1),
        wait_s=round(time.monotonic() - rehearsed, 1),
    )


if __name__ == "__main__":
    main()
