"""Measure products of fp8 weights with scales of blocks: ``python -m bench.block_products [rows=1,8,64,512,4096]
[shapes=6144x4096,4096x4096,28672x4096,4096x14336] [mode=compare|tune] [seconds=8]``.

A shape is the outputs and inputs of a weight. Values are random. ``mode=compare`` prints the times of the Triton kernel
and of cuBLAS, of torch's product with one scale per row (``quantization=fp8``), and for at most 16 rows of the products
that take rows in 16 bits. Each result is compared with a product in float32. ``mode=tune`` searches for the fastest
tiles for ``seconds`` instead, for ``_TILES`` of ``layers/triton_block_fp8.py``. Each measurement cycles through several
weights, so that they do not stay in the L2 cache. The last line is one JSON object.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field

from bench.graph_times import graph_ms
from bench.local_worker import refuse
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Float
from services.worker.layers.block_fp8 import BLOCK, expand_blocks, quantize_blocks
from services.worker.layers.fp8 import Quantized, quantize_rows, scaled_product

_CYCLED_BYTES = 200 << 20  # of weights, more than an L2 cache holds
_LARGEST_ERROR = 0.02  # of the norm of a result; rounding to bfloat16 and sums of 14 bits are below 0.01
_OPTIONS = {
    "rows": (16, 32, 64, 128),
    "outputs": (16, 32, 64, 128),
    "warps": (4, 8),
    "stages": (3, 4, 5, 6, 8),
    "group": (1, 8, 16),
}
_NUMBERS = r"^[1-9]\d*(,[1-9]\d*)*$"
_SHAPES = r"^[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*$"


class BlockBenchConfig(Config):
    """The flags."""

    rows: str = Field("1,8,64,512,4096", pattern=_NUMBERS, description="numbers of rows")
    shapes: str = Field(
        "6144x4096,4096x4096,28672x4096,4096x14336", pattern=_SHAPES, description="outputs and inputs of weights"
    )
    mode: Literal["compare", "tune"] = "compare"
    seconds: Float = Field(8, gt=0, description="duration of the search, per shape and number of rows")


class Factors(NamedTuple):
    """The factors of a product."""

    x: torch.Tensor  # [rows, inputs] bfloat16
    blocks: Quantized  # x with scales of 128 columns
    rows: Quantized  # x with scales of rows
    weight: torch.Tensor  # [outputs, inputs] fp8
    scale: torch.Tensor  # [row blocks, column blocks]
    row_scale: torch.Tensor  # [1, outputs]; not that of ``weight``


Product = Callable[[Factors], torch.Tensor]


def main() -> None:
    """Measure, print a table, and a JSON object as the last line."""
    config = from_command_line(BlockBenchConfig)
    if not torch.cuda.is_available():
        refuse("bench.block_products needs a CUDA device")
    print(f"us per product, on {torch.cuda.get_device_name()}")
    figures = []
    for shape in config.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        weights = [_weight(outputs, inputs, seed) for seed in range(max(2, _CYCLED_BYTES // (outputs * inputs)))]
        for rows in map(int, config.rows.split(",")):
            factors = _factors(rows, weights)
            found = _tune(factors, config.seconds) if config.mode == "tune" else _compare(factors)
            figures.append({"outputs": outputs, "inputs": inputs, "rows": rows, **found})
    report({"device": torch.cuda.get_device_name(), "figures": figures})


def _weight(outputs: int, inputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return quantize_blocks(torch.randn(outputs, inputs, device="cuda", generator=generator) / inputs**0.5)


def _factors(rows: int, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Factors]:
    inputs = weights[0][0].shape[1]
    x = torch.randn(rows, inputs, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)).bfloat16()
    ones = torch.ones(1, len(weights[0][0]), device="cuda")
    return [Factors(x, quantize_rows(x, BLOCK), quantize_rows(x), *weight, ones) for weight in weights]


def _compare(factors: list[Factors]) -> dict[str, Any]:
    """Return microseconds and errors by product, and print them."""
    (rows, _), (outputs, inputs) = factors[0].x.shape, factors[0].weight.shape
    ms = {name: graph_ms(run, factors) for name, run in _products(rows, outputs, inputs).items()}
    times = {name: 1000 * found for name, found in ms.items() if found is not None}
    errors = {
        name: _error(run(factors[0]), factors[0], sixteen_bits="16" in name)
        for name, run in _products(rows, outputs, inputs).items()
        if "row" not in name and name in times
    }
    base = times["row scales"]
    ratios = (f"{name} {found:8.1f} ({found / base:4.2f})" for name, found in times.items())
    print(f"{outputs:>6} x {inputs:>5}, {rows:>5} rows:", *ratios, flush=True)
    for name, error in errors.items():
        if not error < _LARGEST_ERROR:
            refuse(f"{name}, {rows} rows of {outputs} x {inputs}: the error is {error:.4f} of the result's norm")
    return {"us": times, "errors": errors}


def _products(rows: int, outputs: int, inputs: int) -> dict[str, Product]:
    """Return the products to compare, by name."""
    from services.worker.layers import triton_block_fp8 as kernels
    from services.worker.layers.triton_rows import quantize
    from services.worker.layers.triton_skinny import MOST_ROWS, LinearWeights, skinny_product

    tile = kernels.choose_tile(rows, outputs)
    found: dict[str, Product] = {
        "row scales": lambda each: scaled_product(*each.rows, each.weight, each.row_scale, None, torch.bfloat16),
        "triton": lambda each: kernels.product_with_tile(*each.blocks, each.weight, each.scale, torch.bfloat16, tile),
    }
    if rows >= 8 and kernels.cublas_supports(outputs, inputs):
        found["cublas"] = lambda each: kernels.cublas_product(*each.blocks, each.weight, each.scale, torch.bfloat16)
    if rows <= MOST_ROWS:
        found["row scales, 16 bits"] = lambda each: skinny_product(
            each.x, LinearWeights(each.weight, None, each.row_scale[0])
        )
        found["blocks, 16 bits"] = lambda each: skinny_product(each.x, LinearWeights(each.weight, None, each.scale))
    found["quantize to row scales"] = lambda each: quantize(each.x)[0]
    found["quantize to rows of blocks"] = lambda each: quantize(each.x, BLOCK)[0]
    return found


def _error(found: torch.Tensor, factors: Factors, *, sixteen_bits: bool) -> float:
    """Return the norm of the error of ``found``, divided by the norm of the product in float32."""
    values = factors.x.float()
    if not sixteen_bits:
        blocks = factors.blocks
        values = blocks.rows.float() * blocks.scale.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    expected = values @ (factors.weight.float() * expand_blocks(factors.scale, *factors.weight.shape)).t()
    return float((found.float() - expected).norm() / expected.norm())


def _tune(factors: list[Factors], seconds: float) -> dict[str, Any]:
    """Change one option at a time and keep faster tiles, until the time is over or no change helps."""
    from services.worker.layers.triton_block_fp8 import BlockTile, choose_tile, product_with_tile

    rows, (outputs, inputs) = len(factors[0].x), factors[0].weight.shape

    def ms(tile: BlockTile) -> float | None:
        return graph_ms(
            lambda each: product_with_tile(*each.blocks, each.weight, each.scale, torch.bfloat16, tile), factors
        )

    def neighbours(tile: BlockTile) -> Iterator[BlockTile]:
        for name, values in _OPTIONS.items():
            for value in values:
                yield tile._replace(**{name: value})

    best, deadline = choose_tile(rows, outputs), time.monotonic() + seconds
    before = least = ms(best) or float("inf")
    seen, changed = {best}, True
    while changed and time.monotonic() < deadline:
        changed = False
        for tile in neighbours(best):
            if tile in seen or time.monotonic() > deadline:
                continue
            seen.add(tile)
            found = ms(tile)
            if found is not None and found < 0.99 * least:
                best, least, changed = tile, found, True
    print(f"{outputs:>6} x {inputs:>5}, {rows:>5} rows: {1000 * least:8.1f}, {1000 * before:8.1f} before:", end=" ")
    print(f"{best}, {len(seen)} tried", flush=True)
    return {"us": 1000 * least, "table_us": 1000 * before, "tile": str(best), "tried": len(seen)}


if __name__ == "__main__":
    main()
