"""Measure the experts' kernels of one layer: ``python -m bench.experts [shape=qwen3-30b-a3b]
[weights=bf16|fp8|int8|int4|mxfp4] [tokens=1,64,512,4096,16384] [skew=1.0] [mode=compare|tune] [seconds=30]``.

Weights and rows are random. A token's experts are drawn without replacement, with probabilities ``1 / rank ** skew``.
For each number of tokens, ``mode=compare`` prints the time of a mixture, whose routes are given. It measures our
kernels and those of other libraries in the same run: torch's grouped products, and FlashInfer's if ``flashinfer=T``.
With integers and MXFP4 there is no other library to compare with, but our kernel in Triton (``tiles``), which
serves few tokens, and other GPUs than Hopper.
``mode=tune`` searches for the fastest tiles for ``seconds`` instead, and prints rows for ``layers/expert_tiles.py``.
Each measurement cycles through several layers, so that the weights do not stay in the L2 cache.
The last line is one JSON object.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field

from bench.expert_layers import SHAPES, Layer, Shape, flashinfer_mix, make_layer, make_weights, torch_mix
from bench.graph_times import graph_ms
from bench.local_worker import refuse
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.worker.layers.expert_tiles import MOST_STREAMED_PAIRS, ExpertTiles, choose_tiles
from services.worker.layers.experts import has_groups

# Values that ``mode=tune`` tries, by field of ``ExpertTiles`` and of ``Tile``.
_OPTIONS = {"rows": (16, 32, 64, 128), "group": (1, 4, 8, 16)}
_TILE_OPTIONS = {
    "outputs": (32, 64, 128, 256),
    "inputs": (32, 64, 128, 256),
    "warps": (2, 4, 8),
    "stages": (2, 3, 4, 5),
}


class BenchConfig(Config):
    """The flags."""

    shape: Literal["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b", "tiny"] = "qwen3-30b-a3b"
    weights: Literal["bf16", "fp8", "int8", "int4", "mxfp4"] = "bf16"
    tokens: str = Field("1,64,512,4096,16384", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="numbers of tokens")
    skew: Float = Field(1.0, ge=0, description="exponent of the experts' probabilities; 0: all are equally likely")
    layers: Int = Field(4, ge=1, description="layers that each measurement cycles through")
    mode: Literal["compare", "tune"] = "compare"
    seconds: Float = Field(30, gt=0, description="duration of the search, per number of tokens")
    flashinfer: bool = Field(False, description="also measure FlashInfer, which may compile its kernels for minutes")


Run = Callable[[Layer], torch.Tensor]


def main() -> None:
    """Measure, print a table, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    if not torch.cuda.is_available():
        refuse("bench.experts needs a CUDA device")
    shape, figures = SHAPES[config.shape], []
    layers = [make_weights(shape, config.weights, seed) for seed in range(config.layers)]
    print(f"{config.shape}, {config.weights}, skew {config.skew}, on {torch.cuda.get_device_name()}")
    for tokens in map(int, config.tokens.split(",")):
        inputs = [
            make_layer(shape, tokens, config.skew, *each) for each in zip(layers, range(config.layers), strict=True)
        ]
        measure = _tune if config.mode == "tune" else _compare
        figures.append({"tokens": tokens, **measure(config, shape, inputs)})
    report({"shape": config.shape, "weights": config.weights, "skew": config.skew, "figures": figures})


def _compare(config: BenchConfig, shape: Shape, layers: list[Layer]) -> dict[str, Any]:
    from services.worker.layers.cuda_kernels import CudaKernels

    kernels = CudaKernels()
    runs: dict[str, Run] = {
        "ours": lambda layer: kernels.mix(*layer, shape.activation),
    }
    if has_groups(layers[0].weights.down_scale):
        runs["tiles"] = _with_tiles(shape, *_options(shape, layers[0]))
    else:
        runs["torch"] = partial(torch_mix, shape)
    if config.flashinfer:
        runs["flashinfer"] = flashinfer_mix
    figures: dict[str, Any] = {name: graph_ms(run, layers) for name, run in runs.items()}
    ours, pairs = figures["ours"], layers[0].routes.experts.numel()
    used = sum(len(layer.routes.experts.unique()) for layer in layers) / len(layers)
    size, weights = 3 * shape.hidden * shape.width, layers[0].weights
    stored = (weights.gate_up.nbytes + weights.down.nbytes) // shape.experts
    figures |= {
        "tflops": 2 * pairs * size / ours / 1e9,
        "gb_s": used * stored / ours / 1e6,
    }
    ratios = (f"{name} {ms:8.4f} ms ({ms / ours:5.2f})" for name, ms in figures.items() if name in runs and ms)
    head = f"{len(layers[0].x):>6} tokens, {used:5.1f} experts:"
    print(head, *ratios, f"{figures['tflops']:6.1f} TFLOP/s, {figures['gb_s']:6.0f} GB/s of weights", flush=True)
    return figures


def _options(shape: Shape, layer: Layer) -> tuple[ExpertTiles, bool]:
    """Return the tiles of the table for ``layer``, and whether pairs are streamed."""
    pairs, weights = layer.routes.experts.numel(), layer.weights
    tiles = choose_tiles(pairs, shape.experts, weights.down.itemsize, groups=has_groups(weights.down_scale))
    return tiles, pairs <= MOST_STREAMED_PAIRS


def _with_tiles(shape: Shape, tiles: ExpertTiles, streamed: bool) -> Run:
    """Return the mixture in Triton, which has options."""
    from services.worker.layers.triton_experts import mix_with_tiles

    def run(layer: Layer) -> torch.Tensor:
        output = torch.empty_like(layer.x)
        mix_with_tiles(*layer, shape.activation, tiles, streamed=streamed, output=output, add=False)
        return output

    return run


def _tune(config: BenchConfig, shape: Shape, layers: list[Layer]) -> dict[str, Any]:
    """Change one option at a time and keep faster tiles, until the time is over or no change helps."""
    pairs, deadline = layers[0].routes.experts.numel(), time.monotonic() + config.seconds
    best, streamed = _options(shape, layers[0])

    def ms(tiles: ExpertTiles, streamed: bool) -> float | None:
        return graph_ms(_with_tiles(shape, tiles, streamed), layers)

    before = least = ms(best, streamed) or float("inf")
    if pairs <= 8 * MOST_STREAMED_PAIRS and (other := ms(best, not streamed)) and other < least:
        streamed, least = not streamed, other
    seen, changed = {best}, True
    while changed and time.monotonic() < deadline:
        changed = False
        for tiles in _neighbours(best):
            if tiles in seen or time.monotonic() > deadline:
                continue
            seen.add(tiles)
            found = ms(tiles, streamed)
            if found is not None and found < 0.99 * least:
                best, least, changed = tiles, found, True
    print(f"{len(layers[0].x):>6} tokens, {pairs / shape.experts:7.2f} pairs per expert, streamed={streamed}:", end=" ")
    print(f"{least:.4f} ms, {before:.4f} ms with the table: {best}, {len(seen)} tried", flush=True)
    return {"ms": least, "table_ms": before, "streamed": streamed, "tiles": str(best), "tried": len(seen)}


def _neighbours(tiles: ExpertTiles) -> Iterator[ExpertTiles]:
    """Yield ``tiles`` with each value of each option."""
    for part in ("gate_up", "down"):
        for name, values in _TILE_OPTIONS.items():
            for value in values:
                yield tiles._replace(**{part: getattr(tiles, part)._replace(**{name: value})})
    for name, values in _OPTIONS.items():
        for value in values:
            yield tiles._replace(**{name: value})


if __name__ == "__main__":
    main()
