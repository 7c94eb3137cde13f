"""``python -m services.worker.precompile``: compile what a worker will launch; a ``Job`` comes on standard input."""

import sys
import time
from dataclasses import replace

import structlog
import torch

from services.common.log import configure
from services.worker import boot_cuda
from services.worker.boot import make_cache, make_model, read_model
from services.worker.parallel.exchange import make_exchanges
from services.worker.parallel.ranks import ALONE, Ranks
from services.worker.precompile.compiler import compile_all
from services.worker.precompile.dry_device import DryTensors, dry
from services.worker.precompile.job import Job
from services.worker.precompile.launches import Launch, recording
from services.worker.progress import BootProgress

log = structlog.get_logger(__name__)

# All kinds of layers are among the first ones, whose windows alternate.
_MOST_LAYERS = 6


def main() -> None:
    """Compile the kernels of the job, and log how many there were."""
    job = Job.model_validate_json(sys.stdin.buffer.read())
    configure("worker", "WARNING", job.config.log_format)  # the worker itself tells what it does
    began = time.monotonic()
    launches = rehearse_dry(job)
    rehearsed = time.monotonic()
    compiled = compile_all(launches, job.gpu.capability)
    configure("worker", job.config.log_level, job.config.log_format)
    log.info(
        "kernels compiled ahead",
        kernels=compiled,
        rehearsal_s=round(rehearsed - began, 1),
        compile_s=round(time.monotonic() - rehearsed, 1),
    )


def rehearse_dry(job: Job) -> list[Launch]:
    """Return the launches of the job's rehearsal. The process is of no use for a real device afterwards."""
    for owner, name, value in dry(job.gpu):
        setattr(owner, name, value)
    config, dtype = job.config, getattr(torch, job.dtype)
    _, described = read_model(config)
    max_context, meta = described.max_context_tokens, torch.device("meta")
    ranks = Ranks(0, config.tp_size, 0, 1)
    layers = range(min(_MOST_LAYERS, described.layers))
    described = replace(described, layers=len(layers), windows=described.windows[: len(layers)])
    with DryTensors(), recording() as found:
        model = make_model(config, described, dtype, torch.device("cuda"), ranks, layers, memory=meta)
        pages = config.page_count or -(-max_context // config.page_size)
        cache, exchanges = make_cache(config, model, pages), make_exchanges(ALONE, 1)
        runner = boot_cuda.assemble(config, model, cache, max_context, None, exchanges, None)
        boot_cuda.rehearse(runner, config, model, exchanges, BootProgress())
    return list(found.values())


if __name__ == "__main__":
    main()
