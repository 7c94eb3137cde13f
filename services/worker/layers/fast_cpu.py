"""Operators between matrix products, compiled for CPUs in float32. Each is one call with one pass over the data."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch

from services.worker.described.layer import Activation
from services.worker.layers.activations import gated
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.kernels import LayerKernels

_MATRIX, _VECTOR = numba.float32[:, ::1], numba.float32[::1]
_VIEW = numba.types.Array(numba.float32, 3, "A")
# Up to this many rows, reading the embedding once is faster than torch's product, which copies it in another order.
_MOST_PROJECTED_ROWS = 16


def _add_norm(x, delta, weight, eps, output):
    size = x.shape[1]
    for row in range(x.shape[0]):
        total = np.float32(0)
        for i in range(size):
            value = x[row, i] + delta[row, i]
            x[row, i] = value
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            output[row, i] = x[row, i] * scale * weight[i]


def _norm(x, weight, eps, output):
    size = x.shape[1]
    for row in range(x.shape[0]):
        total = np.float32(0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            output[row, i] = x[row, i] * scale * weight[i]


def _gate(gate_up, output):
    size = output.shape[1]
    powers = np.empty(size, np.float32)
    bits = powers.view(np.int32)
    fractions = np.empty(size, np.float32)
    for row in range(output.shape[0]):
        for i in range(size):
            # exp(-gate) = 2**x = 2**round(x), from the exponent bits, times 2**f, from a polynomial.
            x = min(max(gate_up[row, i] * np.float32(-1.442695041), np.float32(-126)), np.float32(126))
            whole = np.floor(x + np.float32(0.5))
            fractions[i] = x - whole
            bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        for i in range(size):
            f = fractions[i]
            power = np.float32(0.000153707049) * f + np.float32(0.00133998482)
            power = power * f + np.float32(0.00961837359)
            power = power * f + np.float32(0.0555032901)
            power = power * f + np.float32(0.240226477)
            power = power * f + np.float32(0.693147182)
            power = power * f + np.float32(1)
            output[row, i] = gate_up[row, i] / (np.float32(1) + powers[i] * power) * gate_up[row, size + i]


def _rotate(x, cos, sin, output):
    heads, size = x.shape[1], x.shape[2]
    half = size // 2
    for token in range(x.shape[0]):
        for head in range(heads):
            for i in range(half):
                low, high = x[token, head, i], x[token, head, half + i]
                output[token, head, i] = low * cos[token, i] + high * sin[token, i]
                output[token, head, half + i] = high * cos[token, half + i] + low * sin[token, half + i]


def _project(hidden, embedding, output):
    for token in range(embedding.shape[0]):
        for row in range(hidden.shape[0]):
            total = np.float32(0)
            for i in range(hidden.shape[1]):
                total += hidden[row, i] * embedding[token, i]
            output[row, token] = total


class CpuFunctions(NamedTuple):
    """The functions above, compiled for numpy arrays."""

    add_norm: Callable[..., None]
    norm: Callable[..., None]
    gate: Callable[..., None]
    rotate: Callable[..., None]
    project: Callable[..., None]


@cache
def compiled() -> CpuFunctions:
    """Return the compiled functions. The first call compiles them."""
    f4 = numba.float32
    return CpuFunctions(
        compile_function(_add_norm, numba.void(_MATRIX, _MATRIX, _VECTOR, f4, _MATRIX)),
        compile_function(_norm, numba.void(_MATRIX, _VECTOR, f4, _MATRIX)),
        compile_function(_gate, numba.void(_MATRIX, _MATRIX)),
        compile_function(_rotate, numba.void(_VIEW, _MATRIX, _MATRIX, f4[:, :, ::1])),
        compile_function(_project, numba.void(_MATRIX, _MATRIX, _MATRIX)),
    )


class FastCpuKernels(LayerKernels):
    """Operators for CPUs in float32. The constructor compiles them."""

    def __init__(self) -> None:
        self._add_norm, self._norm, self._gate, self._rotate, self._project = compiled()

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        if delta is not None:
            output = np.empty(x.shape, np.float32)
            self._add_norm(x.numpy(), delta.numpy(), weight.numpy(), eps, output)
            return torch.from_numpy(output)
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # x may be a view of some of the heads
        output = np.empty(rows.shape, np.float32)
        self._norm(rows.numpy(), weight.numpy(), eps, output)
        return torch.from_numpy(output).view(x.shape)

    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        if activation != "silu":
            return gated(gate_up, activation)
        output = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
        self._gate(gate_up.numpy(), output)
        return torch.from_numpy(output)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        output = np.empty(x.shape, np.float32)
        self._rotate(x.numpy(), cos.squeeze(1).numpy(), sin.squeeze(1).numpy(), output)
        return torch.from_numpy(output)

    def project(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        if len(hidden) > _MOST_PROJECTED_ROWS:
            return super().project(hidden, embedding)
        output = np.empty((len(hidden), len(embedding)), np.float32)
        self._project(hidden.contiguous().numpy(), embedding.numpy(), output)
        return torch.from_numpy(output)
