"""Compare steps of a CPU worker with weights in several forms, in turn in one process.

``python -m bench.cpu_weights [model=builtin] [weights=float32,bfloat16,int8,int4] [threads=2] [steps=10] [rounds=7]
[batches=1,8,32,64] [context=64] [prompts=]``

Each round measures all forms, one after the other, so that other work on the machine affects all alike. The fastest
round of a form counts, and ratios to the first form are medians over rounds. The last line is one JSON object.
"""

import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the worker's process

import numpy as np
from pydantic import Field

from bench.server import report
from bench.worker_step import decode_ms
from services.common.config import WorkerConfig, from_command_line
from services.common.flags import Config, Int, Ints, Strings
from services.common.plan.types import Admission, Batch, Plan, SamplingSettings
from services.worker.boot.common import boot
from services.worker.runner.runner import StepRunner
from tokasaurus.common.v1.sampling_pb2 import Sampling


class BenchConfig(Config):
    """The flags. ``weights`` are dtypes, or values of the flag ``quantization``."""

    model: str = "builtin"
    weights: Strings = ("float32", "bfloat16", "int8", "int4")
    threads: Int = Field(2, ge=1)
    steps: Int = Field(10, ge=1)
    rounds: Int = Field(7, ge=1)
    batches: Ints = (1, 8, 32, 64)
    context: Int = Field(64, ge=1)
    prompts: Ints = Field((), description="lengths of prompts that are measured, too, each in a step of its own")


def main() -> None:
    """Measure, print a line for each form and batch, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    runners = {name: start(config, name) for name in config.weights}
    rows = []
    for kind, size in [("batch", each) for each in config.batches] + [("prompt", each) for each in config.prompts]:
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(config.rounds):
            for name, runner in runners.items():
                if kind == "batch":
                    times[name].append(decode_ms(runner, size, config.context, config.steps, 0.0))
                else:
                    times[name].append(prompt_ms(runner, size))
        first = times[config.weights[0]]
        for name, each in times.items():
            ratio = statistics.median(base / other for base, other in zip(first, each, strict=True))
            row = {"weights": name, kind: size, "ms": round(min(each), 2), "ratio": round(ratio, 2)}
            row["tokens_per_s"] = round(1000 * size / min(each))
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
    report({"model": config.model, "threads": config.threads, "context": config.context, "steps": rows})


def prompt_ms(runner: StepRunner, tokens: int) -> float:
    """Return the milliseconds of a step with a prompt of ``tokens`` tokens."""
    runner.reset()
    token_ids = np.arange(tokens) % runner.limits.vocab_size
    pages = np.arange(-(-tokens // runner.limits.page_size))
    admission = Admission(0, token_ids, 0, pages, SamplingSettings(Sampling(temperature=0.0)))
    started = time.perf_counter()
    runner.run(Plan(1, admissions=(admission,), batch=Batch(np.array([0]), np.array([tokens]))))
    return 1000 * (time.perf_counter() - started)


def start(config: BenchConfig, weights: str) -> StepRunner:
    """Return a runner of the model with ``weights``."""
    # With ``auto``, a GGUF file may keep its integers.
    flags = {"quantization": weights} if weights.startswith("int") else {"quantization": "none", "dtype": weights}
    most = max(config.batches)
    pages = max(most * -(-(config.context + config.steps + 1) // 16), *(-(-each // 16) for each in config.prompts), 0)
    settings = {"torch_num_threads": config.threads, "kv_cache_num_tokens": 16 * pages, "max_seqs_per_forward": most}
    return boot(WorkerConfig(model=config.model, device="cpu", **settings, **flags)).runner


if __name__ == "__main__":
    main()
