"""Compare decode steps of a CPU worker with weights in several forms, in turn in one process.

``python -m bench.cpu_weights [model=builtin] [weights=float32,bfloat16,int8,int4] [threads=2] [steps=10] [rounds=7]
[batches=1,8,32,64] [context=64]``

Each round measures all forms, one after the other, so that other work on the machine affects all alike. The fastest
round of a form counts, and ratios to the first form are medians over rounds. The last line is one JSON object.
"""

import os
import statistics

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the worker's process

from pydantic import Field

from bench.server import report
from bench.worker_step import decode_ms
from services.common.config import WorkerConfig, from_command_line
from services.common.flags import Config, Int, Ints, Strings
from services.worker.boot.common import boot
from services.worker.runner.runner import StepRunner


class BenchConfig(Config):
    """The flags. ``weights`` are dtypes, or values of the flag ``quantization``."""

    model: str = "builtin"
    weights: Strings = ("float32", "bfloat16", "int8", "int4")
    threads: Int = Field(2, ge=1)
    steps: Int = Field(10, ge=1)
    rounds: Int = Field(7, ge=1)
    batches: Ints = (1, 8, 32, 64)
    context: Int = Field(64, ge=1)


def main() -> None:
    """Measure, print a line for each form and batch, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    runners = {name: start(config, name) for name in config.weights}
    rows = []
    for batch in config.batches:
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(config.rounds):
            for name, runner in runners.items():
                times[name].append(decode_ms(runner, batch, config.context, config.steps, 0.0))
        first = times[config.weights[0]]
        for name, each in times.items():
            ratio = statistics.median(base / other for base, other in zip(first, each, strict=True))
            row = {"weights": name, "batch": batch, "ms": round(min(each), 2), "ratio": round(ratio, 2)}
            row["tokens_per_s"] = round(1000 * batch / min(each))
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
    report({"model": config.model, "threads": config.threads, "context": config.context, "steps": rows})


def start(config: BenchConfig, weights: str) -> StepRunner:
    """Return a runner of the model with ``weights``."""
    flags = {"quantization": weights} if weights.startswith("int") else {"dtype": weights}
    most = max(config.batches)
    tokens = most * -(-(config.context + config.steps + 1) // 16) * 16
    settings = {"torch_num_threads": config.threads, "kv_cache_num_tokens": tokens, "max_seqs_per_forward": most}
    return boot(WorkerConfig(model=config.model, device="cpu", **settings, **flags)).runner


if __name__ == "__main__":
    main()
