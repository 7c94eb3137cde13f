"""Measure the time of a decode step in this process, and that of transformers with the same model.

``python -m bench.worker_step [model=builtin] [threads=2] [steps=30] [rounds=3] [batches=1,16,64,256] [contexts=64,256]
[compare_batch=64] [temperature=0]``

Both decode from a full cache, transformers always greedily and with ``compare_batch`` sequences only (0 = not at all).
Each round measures both. The fastest round counts, since other work on the machine can only add time. The last line is
one JSON object.
"""

import os
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the worker's process

import numpy as np
import torch
import transformers
from pydantic import Field

from bench.server import report
from services.common.config import WorkerConfig, from_command_line
from services.common.flags import Config, Float, Int, Ints
from services.common.model import files as model_files
from services.common.plan.types import Admission, Batch, Plan, SamplingSettings
from services.worker.boot.common import boot
from services.worker.runner.runner import StepRunner
from tokasaurus.common.v1.sampling_pb2 import Sampling

NONE = np.empty(0, np.int64)


class BenchConfig(Config):
    """The flags. ``compare_batch`` is the batch size that transformers also runs; 0 = none, as for GGUF files."""

    model: str = "builtin"
    threads: Int = Field(2, ge=1)
    steps: Int = Field(30, ge=1)
    rounds: Int = Field(3, ge=1)
    batches: Ints = (1, 16, 64, 256)
    contexts: Ints = (64, 256)
    compare_batch: Int = 64
    temperature: Float = Field(0.0, ge=0)


def main() -> None:
    """Measure, print a table, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    largest = max(config.batches) * -(-(max(config.contexts) + config.steps + 1) // 16) * 16
    worker = WorkerConfig(
        model=config.model,
        torch_num_threads=config.threads,
        kv_cache_num_tokens=largest,
        max_seqs_per_forward=max(config.batches),
    )
    runner = boot(worker).runner
    reference = None
    if config.compare_batch in config.batches:
        path = model_files.resolve(config.model, weights=True)
        reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    rows = []
    for batch in config.batches:
        for context in config.contexts:
            times, theirs = [], []
            for _ in range(config.rounds):
                times.append(decode_ms(runner, batch, context, config.steps, config.temperature))
                if reference is not None and batch == config.compare_batch:
                    theirs.append(transformers_ms(reference, batch, context, config.steps, config.threads))
            row = {"batch": batch, "context": context, "ms": round(min(times), 3)}
            row["tokens_per_s"] = round(1000 * batch / row["ms"])
            if theirs:
                row |= {"transformers_ms": round(min(theirs), 3), "ratio": round(min(theirs) / min(times), 2)}
            print("  ".join(f"{name} {value}" for name, value in row.items()))
            rows.append(row)
    report({"model": config.model, "threads": config.threads, "temperature": config.temperature, "steps": rows})


def decode_ms(runner: StepRunner, batch: int, context: int, steps: int, temperature: float) -> float:
    """Return the mean milliseconds of a step of ``batch`` sequences with ``context`` tokens at the start."""
    torch.set_num_threads(1)  # the runner has threads of its own
    runner.reset()
    pages = -(-(context + steps + 1) // runner.limits.page_size)
    token_ids = np.arange(context) % runner.limits.vocab_size
    admissions = tuple(
        Admission(
            slot,
            token_ids,
            context - 1,
            np.arange(slot * pages, (slot + 1) * pages),
            SamplingSettings(Sampling(temperature=temperature, seed=slot)),
        )
        for slot in range(batch)
    )
    everyone = Batch(np.arange(batch), np.ones(batch, np.int64))
    runner.run(Plan(1, NONE, admissions, NONE, NONE, NONE, NONE, everyone))
    started = time.perf_counter()
    for step in range(steps):
        runner.run(Plan(step + 2, NONE, (), NONE, NONE, NONE, NONE, None))
    return 1000 * (time.perf_counter() - started) / steps


@torch.inference_mode()
def transformers_ms(model: torch.nn.Module, batch: int, context: int, steps: int, threads: int) -> float:
    """Return the milliseconds of ``model(..., cache=...)`` and argmax, the least work of ``generate``."""
    torch.set_num_threads(threads)
    token_ids = (torch.arange(context) % model.config.vocab_size).expand(batch, -1)
    output = model(token_ids, use_cache=True, logits_to_keep=1)
    tokens = output.logits[:, -1].argmax(-1, keepdim=True)
    started = time.perf_counter()
    for _ in range(steps):
        output = model(tokens, cache=output.cache, use_cache=True)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
    return 1000 * (time.perf_counter() - started) / steps


if __name__ == "__main__":
    main()
