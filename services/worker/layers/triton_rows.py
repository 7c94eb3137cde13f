"""Kernels for the operators between matrix products on CUDA: gate, norms, and fp8 quantization fused with either.

Each kernel reads and writes its data once.
"""

import torch
import triton
import triton.language as tl

from services.worker.described.layer import Activation
from services.worker.layers.fp8 import FP8, LARGEST, SMALLEST
from services.worker.layers.operators import operator
from services.worker.layers.triton_activations import gated

_COLUMNS = 2048  # columns per program of a kernel that does not need whole rows
_WARPS = 8


@triton.jit
def _gated(source, columns, size, inside, ACTIVATION: tl.constexpr):
    gate = tl.load(source + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(source + size + columns, inside, other=0.0).to(tl.float32)
    return gated(gate, up, ACTIVATION)


@triton.jit
def _write_quantized(values, row, columns, inside, output, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                     GROUP: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Write the ``BLOCK`` values of a row, scaled so that the largest is ``MOST``, and the scales.

    ``GROUP``: columns that share a scale. Columns outside of ``inside`` must be 0.
    """
    GROUPS: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(values, (GROUPS, GROUP))
    largest = tl.maximum(tl.max(tl.abs(parts), axis=1), LEAST)
    # The maximum ignores NaN, so add zero times the values to propagate NaN to the scale.
    largest += tl.sum(parts * 0.0, axis=1)
    scaled = tl.reshape(parts * (MOST / largest)[:, None], (BLOCK,))
    tl.store(output + row * SIZE + columns, scaled.to(output.dtype.element_ty), inside)
    groups = tl.arange(0, GROUPS)
    tl.store(scales + groups * tl.num_programs(0) + row, largest / MOST, groups * GROUP < SIZE)


@triton.jit
def _gate(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Write ``gated(gate, up)``. Grid: ``(rows, blocks of columns)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = _gated(gate_up + row * 2 * SIZE, columns, SIZE, inside, ACTIVATION)
    tl.store(output + row * SIZE + columns, values.to(output.dtype.element_ty), inside)


@triton.jit
def _gate_quantized(gate_up, output, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
                    GROUP: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Write ``gated(gate, up)``, quantized. Grid: ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = _gated(gate_up + row * 2 * SIZE, columns, SIZE, inside, ACTIVATION)
    _write_quantized(values, row, columns, inside, output, scales, SIZE, BLOCK, GROUP, MOST, LEAST)


@triton.jit
def _normed(x, delta, weight, offsets, columns, inside, eps, SIZE: tl.constexpr, ADDS: tl.constexpr,
            NORMS: tl.constexpr):  # fmt: skip
    """Return a row of ``x``, with ``delta`` added in place if ``ADDS``, and normalised if ``NORMS``."""
    values = tl.load(x + offsets, inside, other=0.0).to(tl.float32)
    if ADDS:
        # Round the sum to the dtype of the residual stream before the norm.
        total = (values + tl.load(delta + offsets, inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + offsets, total, inside)
        values = total.to(tl.float32)
    if NORMS:
        inverse = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
        values = values * inverse * tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _norm(x, delta, weight, output, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """Write the norm of each row. Grid: ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = row * SIZE + columns
    values = _normed(x, delta, weight, offsets, columns, inside, eps, SIZE, ADDS, True)
    tl.store(output + offsets, values.to(output.dtype.element_ty), inside)


@triton.jit
def _norm_quantized(x, delta, weight, output, scales, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                    ADDS: tl.constexpr, NORMS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
                    LEAST: tl.constexpr):  # fmt: skip
    """Write the norm of each row, quantized. Grid: ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = _normed(x, delta, weight, row * SIZE + columns, columns, inside, eps, SIZE, ADDS, NORMS)
    _write_quantized(values, row, columns, inside, output, scales, SIZE, BLOCK, GROUP, MOST, LEAST)


def _empty_quantized(x: torch.Tensor, size: int, block: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised fp8 rows ``[rows, size]`` and their scales, as ``quantize_rows`` returns them."""
    rows, blocks = x.shape[0], 1 if block is None else triton.cdiv(size, block)
    return x.new_empty((rows, size), dtype=FP8), x.new_empty((blocks, rows), dtype=torch.float32).t()


def _group(size: int, width: int, block: int | None) -> int:
    """Return how many of ``width`` columns share a scale. Those from ``size`` on are not columns of the row."""
    return width if block is None or block >= size else block


@operator(
    "gate(Tensor gate_up, str activation) -> Tensor",
    lambda gate_up, activation: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    "CUDA",
)
def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return ``activation(gate) * up``, ``[rows, size]``, for contiguous ``gate_up [rows, 2 * size]``."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((rows, size))
    block = min(_COLUMNS, triton.next_power_of_2(size))
    _gate[(rows, triton.cdiv(size, block))](
        gate_up, output, SIZE=size, BLOCK=block, ACTIVATION=activation, num_warps=_WARPS
    )  # fmt: skip
    return output


@operator(
    "gate_quantized(Tensor gate_up, str activation, int? block=None) -> (Tensor, Tensor)",
    lambda gate_up, activation, block=None: _empty_quantized(gate_up, gate_up.shape[1] // 2, block),
    "CUDA",
)
def gate_quantized(
    gate_up: torch.Tensor, activation: Activation, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``quantize_rows(gate(gate_up, activation), block)``, without rounding in between."""
    size = gate_up.shape[1] // 2
    output, scales = _empty_quantized(gate_up, size, block)
    width = triton.next_power_of_2(size)
    _gate_quantized[(gate_up.shape[0],)](
        gate_up, output, scales, SIZE=size, BLOCK=width, ACTIVATION=activation, GROUP=_group(size, width, block),
        MOST=LARGEST, LEAST=SMALLEST, num_warps=_WARPS,
    )  # fmt: skip
    return output, scales


@operator(
    "norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps) -> Tensor",
    lambda x, delta, weight, eps: torch.empty_like(x),
    "CUDA",
)
def norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``delta`` to ``x`` in place, both ``[rows, size]`` and contiguous, and return the RMS norm of ``x``."""
    size, output = x.shape[1], torch.empty_like(x)
    _norm[(x.shape[0],)](
        x, x if delta is None else delta, weight, output, eps, SIZE=size, BLOCK=triton.next_power_of_2(size),
        ADDS=delta is not None, num_warps=_WARPS,
    )  # fmt: skip
    return output


@operator(
    "norm_quantized(Tensor(a!) x, Tensor? delta, Tensor weight, float eps, int? block=None) -> (Tensor, Tensor)",
    lambda x, delta, weight, eps, block=None: _empty_quantized(x, x.shape[1], block),
    "CUDA",
)
def norm_quantized(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``delta`` to ``x`` in place, both ``[rows, size]`` and contiguous, and return its RMS norm, quantized."""
    return _quantized(x, delta, weight, eps, block)


@operator(
    "quantize(Tensor x, int? block=None) -> (Tensor, Tensor)",
    lambda x, block=None: _empty_quantized(x, x.shape[1], block),
    "CUDA",
)
def quantize(x: torch.Tensor, block: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``quantize_rows(x, block)`` for contiguous ``x [rows, size]``."""
    return _quantized(x, None, None, 0.0, block)


def _quantized(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float, block: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[1]
    output, scales = _empty_quantized(x, size, block)
    width = triton.next_power_of_2(size)
    _norm_quantized[(x.shape[0],)](
        x, x if delta is None else delta, x if weight is None else weight, output, scales, eps, SIZE=size, BLOCK=width,
        ADDS=delta is not None, NORMS=weight is not None, GROUP=_group(size, width, block), MOST=LARGEST,
        LEAST=SMALLEST, num_warps=_WARPS,
    )  # fmt: skip
    return output, scales
