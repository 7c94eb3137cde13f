"""Measure the products of a mixture of experts on a CPU: ``python -m bench.cpu_experts [batches=1,8,32] [experts=32]
[chosen=8] [hidden_size=2048] [width=768] [rounds=7]``.

Compares one layer of experts in float32, and as integers of 8 and 4 bits, in one thread. The weights are random, and
each token has random experts. Each round measures all forms, one after the other. The fastest round of a form counts.
The last line is one JSON object.
"""

import time

import torch
from pydantic import Field

from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Int, Ints
from services.worker.layers import products_cpu  # noqa: F401  the operator
from services.worker.layers.experts import ExpertWeights, Routes, mix
from services.worker.layers.integers import IntegerRows, zero_panels


class BenchConfig(Config):
    """The flags. The defaults have the sizes of an expert of Qwen3-30B-A3B."""

    batches: Ints = (1, 8, 32)
    experts: Int = Field(32, ge=1)
    chosen: Int = Field(8, ge=1, description="experts of a token")
    hidden_size: Int = Field(2048, ge=32, multiple_of=32)
    width: Int = Field(768, ge=32, multiple_of=32)
    rounds: Int = Field(7, ge=1)


@torch.inference_mode()
def main() -> None:
    """Measure, print a line for each number of tokens, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    if config.chosen > config.experts:
        raise SystemExit(f"chosen={config.chosen} is larger than experts={config.experts}; choose fewer")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = (2 * config.width, config.hidden_size), (config.hidden_size, config.width)
    floats = [torch.randn(config.experts, *shape, generator=generator).mul_(0.02) for shape in shapes]
    forms = {"float32": ExpertWeights(*floats, None, None), "int8": integers(floats, 8), "int4": integers(floats, 4)}
    rows = []
    for tokens in config.batches:
        x = torch.randn(tokens, config.hidden_size, generator=generator)
        scores, order = torch.rand(tokens, config.experts, generator=generator).sort(descending=True)
        routes = Routes(order[:, : config.chosen].int(), scores[:, : config.chosen])
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(config.rounds + 1):  # the first compiles
            for name, weights in forms.items():
                started = time.perf_counter()
                mix(x, routes, weights, "silu")
                times[name].append(1000 * (time.perf_counter() - started))
        row = {"tokens": tokens} | {f"{name}_ms": round(min(each[1:]), 2) for name, each in times.items()}
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    report({"rows": rows})


def integers(matrices: list[torch.Tensor], bits: int) -> ExpertWeights:
    """Return experts with the values of ``matrices``, each ``[experts, outputs, inputs]``, as integers."""
    weights, scales = zip(
        *(zero_panels(each.shape[1], each.shape[2], bits, len(each)) for each in matrices), strict=True
    )
    for matrix, weight, scale in zip(matrices, weights, scales, strict=True):
        for index, rows in enumerate(matrix):
            IntegerRows(weight[index], scale[index], 0, len(rows)).copy_(rows)
    return ExpertWeights(*weights, None, None, 0, *scales)


if __name__ == "__main__":
    main()
