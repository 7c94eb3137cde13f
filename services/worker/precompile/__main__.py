"""``python -m services.worker.precompile``: compile the kernels that a worker will launch.

The ``Job`` is read from standard input.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch
import torch._dynamo  # needed for tensors of ``meta``

from services.common.log import configure
from services.worker import boot_cuda
from services.worker.boot import make_cache, make_model, read_model
from services.worker.caches import keep_compiled_code_in
from services.worker.models.config import ModelConfig
from services.worker.parallel.exchange import make_exchanges
from services.worker.parallel.ranks import ALONE, Ranks
from services.worker.precompile.compiler import CompilerPool
from services.worker.precompile.dry_device import DryTensors, dry
from services.worker.precompile.job import Job
from services.worker.precompile.launches import Launch, recording
from services.worker.progress import BootProgress

log = structlog.get_logger(__name__)


def main() -> None:
    """Wait for the job, compile its kernels, and log their number. Without a job, do nothing."""
    received = sys.stdin.buffer.read()
    if not received:
        return
    job = Job.model_validate_json(received)
    keep_compiled_code_in(job.config.compile_cache_dir)
    configure("worker", "WARNING", job.config.log_format)  # the worker logs the phases of the start itself
    started = time.monotonic()
    pool = CompilerPool(job.gpu.capability)
    rehearse_dry(job, pool.compile)
    rehearsed = time.monotonic()
    compiled = pool.close()
    configure("worker", job.config.log_level, job.config.log_format)
    log.info(
        "kernels compiled ahead",
        kernels=compiled,
        rehearsal_s=round(rehearsed - started, 1),
        wait_s=round(time.monotonic() - rehearsed, 1),
    )


def rehearse_dry(job: Job, on_launch: Callable[[Launch], None]) -> None:
    """Call ``on_launch`` with each launch of the job's rehearsal. The process cannot use a real device afterwards."""
    for owner, name, value in dry(job.gpu):
        setattr(owner, name, value)
    config, dtype = job.config, getattr(torch, job.dtype)
    _, described = read_model(config)
    max_context, meta = described.max_context_tokens, torch.device("meta")
    ranks = Ranks(0, config.tp_size, 0, 1)
    layers = range(_layers_to_rehearse(described))
    described = replace(described, layers=len(layers), windows=described.windows[: len(layers)])
    with DryTensors(), recording(on_launch):
        model = make_model(config, described, dtype, torch.device("cuda"), ranks, layers, memory=meta)
        pages = config.page_count or -(-max_context // config.page_size)
        cache, exchanges = make_cache(config, model, pages), make_exchanges(ALONE, 1)
        runner = boot_cuda.assemble(config, model, cache, max_context, None, exchanges, None)
        boot_cuda.rehearse(runner, config, model, exchanges, BootProgress())


def _layers_to_rehearse(described: ModelConfig) -> int:
    """Return how many layers are enough to launch all kernels of the model.

    Those are the first layer, the following ones until each kind of window has occurred, and one as the last layer.
    """
    following = described.windows[1:]
    until_all = max((following.index(window) + 1 for window in set(following)), default=0)
    return min(described.layers, max(1, until_all) + 2)


if __name__ == "__main__":
    main()
