"""The most likely tokens of rows, computed on a CPU in one compiled function.

A decode step runs in several threads. Called from Python, each operator acquires the interpreter lock again, so
concurrent threads block one another.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.linear_cpu import WithAddress, addresses, storage_of
from services.worker.layers.products_cpu import WeightStorage, compiled_product

_ROWS = 64  # rows whose logits are in memory at once


class GreedyHead:
    """A vocabulary head that chooses the most likely token of each row. Any thread may call it."""

    def __init__(self, head: WithAddress) -> None:
        """``head`` has no bias. It is read in place."""
        self._width, (self._weight, self._scale) = head.width, addresses(head)
        self._choose = _compiled(storage_of(head))

    def __call__(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int64, and whether all logits are finite, for ``hidden [rows, hidden_size]`` float32."""
        rows = len(hidden)
        chosen, finite = np.empty(rows, np.int64), np.empty(rows, np.bool_)
        self._choose(hidden.numpy(), self._weight, self._scale, self._width, chosen, finite)
        return chosen, finite


@cache
def _compiled(storage: WeightStorage) -> Any:
    """Return the function of ``GreedyHead``. The first call compiles it."""
    product, most = compiled_product(storage), _ROWS

    def choose(hidden, weight, scale, width, chosen, finite):
        logits = np.empty((min(len(hidden), most), width), np.float32)
        for start in range(0, len(hidden), most):
            inputs = hidden[start : start + most]
            product(inputs, weight, scale, logits[: len(inputs)])
            for row in range(len(inputs)):
                values = logits[row]
                total, largest, token = np.float32(0), values[0], 0
                for i in range(width):
                    total += values[i]
                for i in range(1, width):
                    if values[i] > largest:
                        largest, token = values[i], i
                chosen[start + row], finite[start + row] = token, abs(total) < np.inf

    integer, rows = numba.int64, numba.float32[:, ::1]
    signature = numba.void(rows, integer, integer, integer, integer[::1], numba.boolean[::1])
    return compile_function(choose, signature, keep=False)
