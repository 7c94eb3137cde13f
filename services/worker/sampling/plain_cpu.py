"""Tokens of rows that need only a temperature, computed on a CPU in one compiled function.

A decode step runs in several threads. Called from Python, each operator acquires the interpreter lock again, so
concurrent threads block one another. Tokens are those of ``draw``, except for near ties: exponentials, logarithms and
the largest value of a block may differ in the last bits.
"""

from functools import cache
from math import log
from typing import Any

import numba
import numpy as np
import torch

from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.lanes_cpu import LANES, LOG2_E, weigh
from services.worker.layers.linear_cpu import WithAddress, addresses, storage_of
from services.worker.layers.products_cpu import WeightStorage, make_team_product
from services.worker.layers.team_cpu import Team, run_in_team, share, team_size
from services.worker.sampling.noise_cpu import gumbel
from services.worker.step.noise import NOISE_BLOCK

_ROWS = 64  # rows whose logits are in memory at once


class PlainHead:
    """A vocabulary head that chooses a token for each row. Any thread may call it."""

    def __init__(self, head: WithAddress) -> None:
        """``head`` has no bias. It is read in place."""
        self._width, (self._weight, self._scale) = head.width, addresses(head)
        self._bytes, self._choose = head.weight.nbytes, _compiled(storage_of(head))

    def __call__(
        self, hidden: torch.Tensor, scales: np.ndarray, keys: np.ndarray, team: Team | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int64, and whether all logits are finite, for ``hidden [rows, hidden_size]`` float32.

        ``scales [rows]`` float32 are those of ``scales_of``, and ``keys [rows, 2]`` int32 those of ``row_keys``.
        ``team`` shares the work; None = the calling thread does all.
        """
        rows = len(hidden)
        threads = team_size(team, self._bytes, rows)
        chosen, finite = np.empty(rows, np.int64), np.empty(rows, np.bool_)
        logits = np.empty((min(rows, _ROWS), self._width), np.float32)
        phases, words = 2 * -(-rows // _ROWS), keys.view(np.uint32)
        arguments = hidden.numpy(), self._weight, self._scale, logits, scales, words, chosen, finite
        run_in_team(self._choose, team, threads, phases, *arguments)
        return chosen, finite


@cache
def _compiled(storage: WeightStorage) -> Any:
    """Return the function of ``PlainHead``. The first call compiles it."""
    product, draw, most = make_team_product(storage), _compiled_draw(), _ROWS

    @share
    def choose_token(index, _rows, logits, scales, keys, chosen, finite, block):
        values, total = logits[index], np.float32(0)
        for value in values:
            total += value
        finite[index] = abs(total) < np.inf
        if scales[index] == 0 or not finite[index]:
            chosen[index] = _largest(values)
        else:
            chosen[index] = draw(values, scales[index], keys[index, 0], keys[index, 1], block)

    def choose(thread, counters, hidden, weight, scale, logits, scales, keys, chosen, finite):
        """Choose the tokens. Each thread of a team may call it with its number."""
        block, no_bias = np.empty(NOISE_BLOCK + LANES, np.float32), np.empty(0, np.float32)
        for start in range(0, len(hidden), most):
            inputs, phase = hidden[start : start + most], 2 * (start // most)
            rows = len(inputs)
            product(thread, counters, phase, inputs, weight, scale, no_bias, logits[:rows], np.float32(0))
            end = start + rows
            choose_token(
                thread, counters, phase + 1, rows, logits, scales[start:end], keys[start:end], chosen[start:end],
                finite[start:end], block,
            )  # fmt: skip

    integer, rows = numba.int64, numba.float32[:, ::1]
    signature = numba.void(
        *(integer, integer[:, :, ::1], rows, integer, integer, rows, numba.float32[::1], numba.uint32[:, ::1]),
        *(integer[::1], numba.boolean[::1]),
    )
    return compile_function(choose, signature)


@cache
def _compiled_draw() -> Any:
    """Return ``_draw`` compiled."""
    values, key = numba.float32[::1], numba.uint32
    return compile_function(_draw, numba.int64(values, numba.float32, key, key, values))


@numba.njit(nogil=True)
def _largest(values):
    largest, token = values[0], 0
    for i in range(1, len(values)):
        if values[i] > largest:
            largest, token = values[i], i
    return token


def _draw(values, scale, low, high, block):
    """Draw a token as ``draw`` does: a block of the vocabulary, and then a token of it."""
    width, begin = len(values), 0
    if width > NOISE_BLOCK:
        best = np.float32(-np.inf)
        for start in range(0, width, NOISE_BLOCK):
            count = min(NOISE_BLOCK, width - start)
            for i in range(count):
                block[i] = values[start + i] * scale * np.float32(LOG2_E)
            block[count : count + LANES] = -np.inf
            total, largest = weigh(LANES, block.ctypes.data, (count + LANES - 1) // LANES)
            weight = largest / np.float32(LOG2_E) + log(total) + gumbel(low, high, -1 - start // NOISE_BLOCK)
            if weight > best:
                best, begin = weight, start
    best, token = np.float32(-np.inf), begin
    for i in range(begin, min(begin + NOISE_BLOCK, width)):
        value = gumbel(low, high, i) + values[i] * scale
        if value > best:
            best, token = value, i
    return token
