"""Measure products with quantized weights: ``python -m bench.quantized_products [rows=1,2,4,8,...]
[shapes="8b qkv,8b down"] [group=128] [options=T] [way=any] [out=FILE]``.

Prints the microseconds of a product for each shape, kind of layer and number of rows, with random weights, in a CUDA
graph of several layers whose weights the L2 cache does not hold. ``fp8`` and ``block fp8`` include the quantization of
the input. Each result is compared with a float32 product of the dequantized weight; an error above the kind's bound is
marked with ``!`` and makes the program fail. ``way`` selects one way of ``int8`` and ``int4``: ``wide``, ``tiles`` and
``slices`` are those of ``layers/triton_grouped.py`` for more than 16 rows.

``options=T`` tries the tile sizes of ``layers/triton_grouped.py`` instead, and prints the fastest ones for each shape
and number of rows. Kernels are compiled in several processes first. The last line is one JSON object.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as combinations
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from triton.errors import TritonError

from bench import quantized_layers
from bench.graph_times import compile_in_processes
from bench.local_worker import refuse
from bench.quantized_layers import SHAPES, Kind, kinds, make_layers, microseconds, relative_error
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.worker.layers import triton_grouped
from services.worker.layers.grouped import GroupedWeights
from services.worker.layers.triton_grouped import RowsOptions, TilesOptions

_TRIED_SHAPES = "8b qkv,8b down"
_PARTS = 4  # of the options that are compiled together


class BenchConfig(Config):
    """The flags."""

    rows: str = Field(
        "1,2,4,8,16,32,64,128,256,512,1024,4096", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="numbers of rows"
    )
    shapes: str = Field("", description="names of shapes; default: all, and two with options=T")
    kinds: str = Field("", description="kinds of layers; default: all, and int4 with options=T")
    group: Int = Field(128, ge=32, description="inputs that share a scale")
    way: Literal["any", "wide", "tiles", "slices"] = "any"
    options: bool = Field(False, description="try tile sizes")
    seconds: Float = Field(120, gt=0, description="with options=T, no new size is tried after this time")
    processes: Int = Field(16, ge=1, description="processes that compile kernels")
    out: str = Field("", description="file for the JSON object")


def main() -> None:
    """Measure, print a table, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    if not torch.cuda.is_available():
        refuse("bench.quantized_products needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    names = [name for name in (config.shapes or (_TRIED_SHAPES if config.options else "")).split(",") if name]
    shapes, rows = names or list(SHAPES), [int(each) for each in config.rows.split(",")]
    known = kinds(config.group)
    chosen = [name for name in (config.kinds or ("int4" if config.options else "")).split(",") if name] or list(known)
    if unknown := [each for each in shapes if each not in SHAPES] + [each for each in chosen if each not in known]:
        refuse(f"unknown: {', '.join(unknown)}; expected shapes of {list(SHAPES)} and kinds of {list(known)}")
    print(f"groups of {config.group} inputs, on {torch.cuda.get_device_name()}", flush=True)
    measure = _try_options if config.options else _compare
    with torch.inference_mode():
        figures = measure(config, shapes, chosen, rows)
    if config.out:
        Path(config.out).write_text(json.dumps(figures))
    report({"device": torch.cuda.get_device_name(), "group": config.group, "figures": figures})
    if any(each.get("wrong") for each in figures):
        sys.exit(1)


def _compare(config: BenchConfig, shapes: list[str], chosen: list[str], rows: list[int]) -> list[dict[str, Any]]:
    grouped = [name for name in chosen if name.startswith("int")]
    if grouped:
        compile_in_processes(
            _run_once, [(config, shape, name, rows) for shape in shapes for name in grouped], config.processes
        )
    figures = []
    for shape in shapes:
        print(f"{shape} {SHAPES[shape].inputs} -> {SHAPES[shape].outputs}, us" + "".join(f"{n:>10}" for n in rows))
        for name in chosen:
            kind = _with_way(kinds(config.group)[name], name, config.way)
            layers, weight = make_layers(kind, SHAPES[shape])
            found = [_figure(kind, layers, weight, count) for count in rows]
            figures += [
                {"shape": shape, "kind": name, "rows": count, **each} for count, each in zip(rows, found, strict=True)
            ]
            cells = (f"{each['us']:>9.1f}{'!' if each['wrong'] else ' '}" for each in found)
            worst = max(each["error"] for each in found)
            print(f"  {name:<24}", *cells, f" error {worst:.4f}", sep="", flush=True)
            del layers, weight
            torch.cuda.empty_cache()
    return figures


def _figure(kind: Kind, layers: list[Any], weight: torch.Tensor, rows: int) -> dict[str, Any]:
    x = _inputs(rows, weight.shape[1])
    error = relative_error(kind.product(layers[0], x), x, weight)
    return {
        "us": round(microseconds(kind.product, layers, x), 2),
        "error": round(error, 5),
        "wrong": not error < kind.tolerance,
    }


def _inputs(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, device=quantized_layers.DEVICE, dtype=torch.bfloat16)


def _with_way(kind: Kind, name: str, way: str) -> Kind:
    """Return ``kind`` with products that go the way ``way``, if it has grouped integers."""
    if way == "any" or not name.startswith("int"):
        return kind
    ways = {
        "wide": triton_grouped.launch_wide,
        "tiles": triton_grouped.launch_tiles,
        "slices": triton_grouped.multiply_slices,
    }
    return kind._replace(product=partial(_launched, ways[way]))


def _launched(launch: Callable[..., None], layer: Any, x: torch.Tensor) -> torch.Tensor:
    weights = GroupedWeights.of(layer)
    out = x.new_empty((len(x), weights.shape[0]))
    launch(x, weights, out)
    return out


def _run_once(case: tuple[BenchConfig, str, str, list[int]]) -> None:
    config, shape, name, rows = case
    kind = _with_way(kinds(config.group)[name], name, config.way)
    with torch.inference_mode():
        (layer,), _ = make_layers(kind, SHAPES[shape], copies=1)
        for count in rows:
            kind.product(layer, _inputs(count, SHAPES[shape].inputs))
        torch.cuda.synchronize()


def _grid(rows: int) -> Iterator[RowsOptions | TilesOptions]:
    """Yield the options to try for ``rows`` rows."""
    if rows <= triton_grouped.MOST_ROWS:
        for outputs, (inputs, warps), stages in combinations(
            (16, 32, 64), ((512, 4), (1024, 4), (1024, 8), (2048, 8)), (3, 4, 6)
        ):
            yield RowsOptions(outputs, inputs, warps, stages)
        return
    padded = max(16, 1 << (rows - 1).bit_length())
    for size in {min(256, padded), min(128, padded), min(64, padded)}:
        for (outputs, warps), splits, stages in combinations(
            ((64, 4), (128, 4), (128, 8), (256, 8)), (1, 2, 4) if rows <= 256 else (1,), (3, 4)
        ):
            if outputs * size <= 128 * 32 * warps:  # the sums of a program fit into its registers
                yield TilesOptions(size, outputs, splits, size <= 64, warps, stages)


def _launch(weights: GroupedWeights, x: torch.Tensor, options: RowsOptions | TilesOptions) -> torch.Tensor:
    out = x.new_empty((len(x), weights.shape[0]))
    if isinstance(options, RowsOptions):
        triton_grouped.launch_rows(x, weights, out, options=options)
    else:
        triton_grouped.launch_tiles(x, weights, out, options)
    return out


def _try_options(config: BenchConfig, shapes: list[str], chosen: list[str], rows: list[int]) -> list[dict[str, Any]]:
    began = time.monotonic()
    fused = [count for count in rows if count <= 512]
    # The kernels for 1 to 8 rows are the same. Cases with many options are split, so that processes end together.
    sizes = sorted({max(8, 1 << (count - 1).bit_length()) for count in fused})
    cases = [(config, *each) for each in combinations(shapes, chosen, sizes, range(_PARTS))]
    compile_in_processes(_compile_options, cases, config.processes)
    figures = []
    for shape, name in combinations(shapes, chosen):
        kind = kinds(config.group)[name]
        layers, weight = make_layers(kind, SHAPES[shape])
        for count in fused:
            x = _inputs(count, SHAPES[shape].inputs)
            tried = []
            for options in _grid(count):
                if time.monotonic() - began > config.seconds:
                    break
                product = partial(_with_options, options)
                try:
                    error = relative_error(product(layers[0], x), x, weight)
                    tried.append((microseconds(product, layers, x), error, options))
                except (RuntimeError, TritonError):  # too much shared memory
                    continue
            for us, error, options in sorted(tried)[:3]:
                print(f"{shape} {name} {count:>4} rows {us:8.1f} us  error {error:.4f}  {options}", flush=True)
            wrong = [str(each) for _, error, each in tried if not error < kind.tolerance]
            best = min(tried, default=None)
            figures.append({"shape": shape, "kind": name, "rows": count, "tried": len(tried), "wrong": wrong})
            if best is not None:
                figures[-1] |= {"us": round(best[0], 2), "options": best[2]._asdict()}
    return figures


def _with_options(options: RowsOptions | TilesOptions, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return _launch(GroupedWeights.of(layer), x, options)


def _compile_options(case: tuple[BenchConfig, str, str, int, int]) -> None:
    config, shape, name, rows, part = case
    with torch.inference_mode():
        (layer,), _ = make_layers(kinds(config.group)[name], SHAPES[shape], copies=1)
        x = _inputs(rows, SHAPES[shape].inputs)
        for options in list(_grid(rows))[part::_PARTS]:
            try:
                _launch(GroupedWeights.of(layer), x, options)
            except (RuntimeError, TritonError):  # too much shared memory
                continue
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
