"""What ranks do in tests."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from services.common.config import WorkerConfig
from services.common.plan.types import Plan, WorkerLimits
from services.worker.boot.common import Booted, boot
from services.worker.described.ranks import Ranks
from services.worker.parallel import exchange
from services.worker.runner import runner as runner_module
from services.worker.runner.runner import StepRunner
from services.worker.sampling import sampler
from services.worker.step.output import Sampled, StepOutput

FLAGS = {
    "page_size": 16,
    "kv_cache_num_tokens": 16 * 128,
    "max_tokens_per_forward": 256,
    "max_seqs_per_forward": 8,
    "torch_num_threads": 1,
}

# Of this process, while a replica is up.
booted: Booted | None = None


def make_config(ranks: Ranks, port: int, directory: Path, flags: dict) -> WorkerConfig:
    """Of one worker."""
    grid = {"tp_size": ranks.tp_size, "tp_rank": ranks.tp_rank, "pp_size": ranks.pp_size, "pp_rank": ranks.pp_rank}
    return WorkerConfig(**{"model": str(directory), "master_port": port} | FLAGS | grid | flags)


def start(ranks: Ranks, port: int, directory: Path, flags: dict, fewest_sharded: int) -> WorkerLimits:
    """``fewest_sharded``: tokens from which on activations are sharded."""
    global booted
    exchange.fewest_sharded = lambda row_bytes: fewest_sharded
    booted = boot(make_config(ranks, port, directory, flags))
    return booted.runner.limits


def run(ranks: Ranks, plans: list[Plan]) -> list["Step"]:
    """One step after the other, without waiting for other ranks."""
    return run_on(booted.runner, plans)


def reset(ranks: Ranks) -> None:
    booted.runner.reset()


def stop(ranks: Ranks) -> None:
    """Leave the others, as the end of the process does."""
    global booted
    booted.runner.close()
    booted = None
    gc.collect()


Step = tuple[StepOutput, torch.Tensor | None]


def run_on(runner: StepRunner, plans: list[Plan]) -> list[Step]:
    """Return the outputs, each with the logits ``[samples, vocab_size]`` from which it was sampled.

    A runner that does not cut steps gets the plans without their cuts.
    """
    seen: list[torch.Tensor] = []
    steps: list[Step] = []

    def sample(hidden: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor], *others: Any) -> Sampled:
        seen.append(to_logits(hidden).clone())
        return sampler.sample(hidden, to_logits, *others)

    with patch.object(runner_module, "sample", sample):
        for plan in plans:
            cut = plan if runner.limits.max_micro_batches > 1 else replace(plan, micro_batch_rows=())
            output = runner.run(cut)
            steps.append((output, torch.cat(seen) if seen else None))
            seen.clear()
    return steps
