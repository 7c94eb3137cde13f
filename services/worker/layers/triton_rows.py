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
def _write_quantized(values, row, columns, inside, output, scales, SIZE: tl.constexpr, MOST: tl.constexpr,
                     LEAST: tl.constexpr):  # fmt: skip
    """Write ``values``, scaled so that the largest is ``MOST``. Columns outside of ``inside`` must be 0."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), LEAST)
    # The maximum ignores NaN, so add zero times the values to propagate NaN to the scale.
    largest += tl.sum(values * 0.0, axis=0)
    tl.store(output + row * SIZE + columns, (values * (MOST / largest)).to(output.dtype.element_ty), inside)
    tl.store(scales + row, largest / MOST)


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
                    MOST: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Write ``gated(gate, up)``, quantized. Grid: ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = _gated(gate_up + row * 2 * SIZE, columns, SIZE, inside, ACTIVATION)
    _write_quantized(values, row, columns, inside, output, scales, SIZE, MOST, LEAST)


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
                    ADDS: tl.constexpr, NORMS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Write the norm of each row, quantized. Grid: ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = _normed(x, delta, weight, row * SIZE + columns, columns, inside, eps, SIZE, ADDS, NORMS)
    _write_quantized(values, row, columns, inside, output, scales, SIZE, MOST, LEAST)


def _empty_quantized(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((x.shape[0], size), dtype=FP8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


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
    "gate_quantized(Tensor gate_up, str activation) -> (Tensor, Tensor)",
    lambda gate_up, activation: _empty_quantized(gate_up, gate_up.shape[1] // 2),
    "CUDA",
)
def gate_quantized(gate_up: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``quantize_rows(gate(gate_up, activation))``, without rounding in between."""
    size = gate_up.shape[1] // 2
    output, scales = _empty_quantized(gate_up, size)
    _gate_quantized[(gate_up.shape[0],)](
        gate_up, output, scales, SIZE=size, BLOCK=triton.next_power_of_2(size), ACTIVATION=activation,
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
    "norm_quantized(Tensor(a!) x, Tensor? delta, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, delta, weight, eps: _empty_quantized(x, x.shape[1]),
    "CUDA",
)
def norm_quantized(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``delta`` to ``x`` in place, both ``[rows, size]`` and contiguous, and return its RMS norm, quantized."""
    return _quantized(x, delta, weight, eps)


@operator("quantize(Tensor x) -> (Tensor, Tensor)", lambda x: _empty_quantized(x, x.shape[1]), "CUDA")
def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``quantize_rows(x)`` for contiguous ``x [rows, size]``."""
    return _quantized(x, None, None, 0.0)


def _quantized(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[1]
    output, scales = _empty_quantized(x, size)
    _norm_quantized[(x.shape[0],)](
        x, x if delta is None else delta, x if weight is None else weight, output, scales, eps, SIZE=size,
        BLOCK=triton.next_power_of_2(size), ADDS=delta is not None, NORMS=weight is not None, MOST=LARGEST,
        LEAST=SMALLEST, num_warps=_WARPS,
    )  # fmt: skip
    return output, scales
