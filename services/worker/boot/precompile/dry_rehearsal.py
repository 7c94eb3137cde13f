"""The rehearsal of a start on tensors without memory, to find the kernels that it launches."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch._dynamo  # needed for tensors of ``meta``

from services.worker.boot import cuda as boot_cuda
from services.worker.boot.common import RunnerParts, make_cache
from services.worker.boot.precompile.dry_device import DryTensors, dry
from services.worker.boot.precompile.job import Job
from services.worker.boot.precompile.launches import Launch, recording
from services.worker.boot.progress import BootProgress
from services.worker.boot.sources import make_model, read_model
from services.worker.described.config import ModelConfig
from services.worker.described.heads import laid_out
from services.worker.described.ranks import ALONE, Ranks
from services.worker.parallel.exchange import make_exchanges


def rehearse_dry(job: Job, on_launch: Callable[[Launch], None]) -> None:
    """Call ``on_launch`` with each launch of the job's rehearsal. The process cannot use a real device afterwards."""
    for owner, name, value in dry(job.gpu):
        setattr(owner, name, value)
    config, dtype = job.config, getattr(torch, job.dtype)
    described = laid_out(read_model(config)[1], "cuda")
    meta, ranks = torch.device("meta"), Ranks(0, config.tp_size, 0, 1, config.expert_parallel)
    layers = range(_layers_to_rehearse(described))
    described = replace(described, layers=described.layers[: len(layers)])
    with DryTensors(), recording(on_launch):
        model = make_model(config, described, dtype, torch.device("cuda"), ranks, layers, memory=meta)
        pages = config.page_count or -(-described.max_context_tokens // config.page_size)
        cache, exchanges = make_cache(config, model, pages), make_exchanges(ALONE, 1)
        parts = RunnerParts(config, model)
        boot_cuda.rehearse(boot_cuda.assemble(parts, cache, exchanges), parts, exchanges, BootProgress())


def _layers_to_rehearse(described: ModelConfig) -> int:
    """Return how many layers are enough to launch all kernels of the model.

    These are the first layer, further layers until each kind of layer has occurred, and a last layer.
    """
    following = described.layers[1:]
    until_all = max((following.index(layer) + 1 for layer in set(following)), default=0)
    return min(len(described.layers), max(1, until_all) + 2)
