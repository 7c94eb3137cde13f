"""Measure the products of whole layers for a few rows: ``python -m bench.few_rows [rows=1,2,4,8,16] [shape=8b]
[kinds="bf16,int4"] [group=128]``.

Prints the microseconds of a layer's four products, with its norms, gate and sums, for each kind of weights and number
of rows. They run as in a decode step, in a CUDA graph of several layers, because kernels overlap: times of single
products do not add up to the time of a layer. Weights are random, and there is no attention. The last line is one JSON
object.
"""

from typing import Literal

import torch
from pydantic import Field

from bench.graph_times import compile_in_processes, run_in_graph
from bench.local_worker import refuse
from bench.quantized_layers import DEVICE, SHAPES, kinds, make_layers
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Int
from services.worker.layers.grouped import GroupedWeights
from services.worker.layers.triton_skinny import MOST_ROWS, LinearWeights, NormInput, skinny_product, skinny_sum
from services.worker.models.skinny_cuda import as_weights

_LAYERS = 10  # their weights exceed the L2 cache
_ROUNDS, _RUN_S = 5, 0.02
_EPS = 1e-5

# The weights of a layer's products: ``qkv``, ``output``, ``gate_up`` and ``down``.
Layer = dict[str, LinearWeights | GroupedWeights]


class BenchConfig(Config):
    """The flags."""

    rows: str = Field("1,2,4,8,16", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="numbers of rows")
    shape: Literal["8b", "1b"] = "8b"
    kinds: str = Field("", description="kinds of layers, see bench.quantized_products; default: all")
    group: Int = Field(128, ge=32, description="inputs that share a scale")
    processes: Int = Field(16, ge=1, description="processes that compile kernels")


def make(kind: str, config: BenchConfig, count: int) -> list[Layer]:
    """Return ``count`` layers with equal weights, each with its own memory."""
    layers: list[Layer] = [{} for _ in range(count)]
    for name in ("qkv", "output", "gate_up", "down"):
        made, _ = make_layers(kinds(config.group)[kind], SHAPES[f"{config.shape} {name}"], copies=count)
        for layer, linear in zip(layers, made, strict=True):
            layer[name] = as_weights(linear)
    return layers


def run(layers: list[Layer], x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Return ``x [rows, hidden_size]`` after ``layers`` whose attention returns ``attended``."""
    x, weight = x.clone(), torch.ones_like(x[0])
    first: torch.Tensor | NormInput = x
    for layer in layers:
        skinny_product(first, layer["qkv"], norm=(weight, _EPS))
        mlp_input = skinny_sum(attended, layer["output"], x, weight)
        gated = skinny_product(mlp_input, layer["gate_up"], norm=(weight, _EPS), gated=True)
        first = skinny_sum(gated, layer["down"], x, weight)
    return x


def main() -> None:
    """Measure, print a table, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    if not torch.cuda.is_available():
        refuse("bench.few_rows needs a CUDA device")
    rows, known = [int(each) for each in config.rows.split(",")], kinds(config.group)
    if max(rows) > MOST_ROWS:
        refuse(f"rows={config.rows}: expected at most {MOST_ROWS}")
    chosen = [name for name in config.kinds.split(",") if name] or list(known)
    if unknown := [name for name in chosen if name not in known]:
        refuse(f"kinds={','.join(unknown)}: expected some of {','.join(known)}")
    print(f"groups of {config.group} inputs, on {torch.cuda.get_device_name()}", flush=True)
    compile_in_processes(_run_once, [(config, kind, count) for kind in chosen for count in rows], config.processes)
    print(f"us of a layer of {config.shape}" + "".join(f"{count:>10}" for count in rows))
    figures: dict[str, dict[int, float]] = {}
    with torch.inference_mode():
        for kind in chosen:
            layers = make(kind, config, _LAYERS)
            figures[kind] = {count: _microseconds(layers, count) for count in rows}
            print(f"  {kind:<16}" + "".join(f"{us:>10.1f}" for us in figures[kind].values()), flush=True)
            del layers
            torch.cuda.empty_cache()
    report({"device": torch.cuda.get_device_name(), "group": config.group, "figures": figures})


def _microseconds(layers: list[Layer], rows: int) -> float:
    inputs = _inputs(layers, rows)
    return 1000 * run_in_graph(lambda _: run(layers, *inputs), [0], rounds=_ROUNDS, seconds=_RUN_S) / len(layers)


def _inputs(layers: list[Layer], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` and ``attended`` of ``run``."""
    hidden, attended = (
        torch.randn(rows, size, device=DEVICE, dtype=torch.bfloat16) for size in layers[0]["output"].shape
    )
    return hidden, attended


def _run_once(case: tuple[BenchConfig, str, int]) -> None:
    config, kind, rows = case
    with torch.inference_mode():
        layers = make(kind, config, 2)
        run(layers, *_inputs(layers, rows))
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
