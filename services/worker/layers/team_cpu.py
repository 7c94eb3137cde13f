"""Work that the threads of a team share inside of compiled functions.

The work is a sequence of phases, each of a number of items. Each thread has a share of consecutive items, and claims
them one after the other, and then those of other threads. If no item is left, it blocks until all items of the phase
are finished. Threads may be absent: if a thread starts late, it finds all items of a phase claimed, and goes on to the
next.
"""

import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.common.boundaries import errors_to
from services.worker.layers.lanes_cpu import int64

_LINE = 8  # integers of a cache line
_FAILED = 1  # index in the first cache line of the counters of what is 1 after a thread has failed
# Bytes of weights that a thread reads at least, since waking a thread for less takes longer than reading them, and the
# rows by which they are multiplied in the time of a read.
_THREAD_BYTES, _PASS_ROWS = 4 << 20, 4
# How often a thread looks for the end of a phase before it offers its processor to other threads each time.
_SPINS = 2000
_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


class Team(Protocol):
    """The calling thread, and others that may run the same compiled function."""

    @property
    def size(self) -> int:
        """Number of threads, the calling one included."""

    def assist(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Start the jobs, which raise nothing, in other threads, and do not wait for them. They may start late."""


def team_size(team: Team | None, weight_bytes: int, rows: int) -> int:
    """Return the number of threads of ``team`` that multiply ``rows`` rows by weights of ``weight_bytes``."""
    if team is None:
        return 1
    passes = -(-rows // _PASS_ROWS)
    return min(team.size, max(1, weight_bytes * passes // _THREAD_BYTES))


def run_in_team(
    function: Callable[..., object], team: Team | None, threads: int, phases: int, *arguments: object
) -> None:
    """Run ``function(thread, counters, *arguments)`` in the calling thread, and in ``threads - 1`` others of ``team``.

    Return when all ``phases`` are finished. If a thread raises an error before, the others end, and it is raised here.
    """
    counters, errors = new_counters(phases, threads), list[BaseException]()

    def job(thread: int) -> None:
        with errors_to(errors.append, BaseException):
            function(thread, counters, *arguments)
            return
        counters[0, 0, _FAILED] = 1

    if team is not None:
        team.assist([partial(job, thread) for thread in range(1, threads)])
    job(0)
    if errors:
        raise errors[0]


def new_counters(phases: int, threads: int) -> np.ndarray:
    """Return what ``threads`` share in a sequence of phases: ``[phases, threads + 1, 8]`` int64.

    There is a counter of the claimed items of each thread's share, and then one of the finished items of all.
    """
    return np.zeros((phases, threads + 1, _LINE), np.int64)


@numba.njit(nogil=True)
def claim(counters, phase, items, thread):
    """Return the next of the ``items`` of a phase for ``thread``, or ``items`` if none is left."""
    threads = counters.shape[1] - 1
    for offset in range(threads):
        owner = (thread + offset) % threads
        first, last = items * owner // threads, items * (owner + 1) // threads
        if first < last:
            item = first + _increment(counters[phase, owner].ctypes.data)
            if item < last:
                return item
    return items


@numba.njit(nogil=True)
def finish(counters, phase):
    """Count a claimed item as finished."""
    _increment(counters[phase, counters.shape[1] - 1].ctypes.data)


@numba.njit(nogil=True)
def wait(counters, phase, items):
    """Wait until all ``items`` of a phase are finished, or a thread has failed.

    What the threads wrote can be read afterwards.
    """
    place, spins = counters[phase, counters.shape[1] - 1].ctypes.data, 0
    failed = counters.ctypes.data + 8 * _FAILED
    while _read(place) < items and _read(failed) == 0:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _sched_yield()


def share(work):
    """Return ``run(thread, counters, phase, items, *arguments)``, which takes part in a phase.

    It compiles ``work(item, items, *arguments)``, and calls it for each item that the thread claims.
    """
    compiled = numba.njit(nogil=True)(work)

    @numba.njit(nogil=True)
    def run(thread, counters, phase, items, *arguments):
        item = claim(counters, phase, items, thread)
        while item < items:
            compiled(item, items, *arguments)
            finish(counters, phase)
            item = claim(counters, phase, items, thread)
        wait(counters, phase, items)

    return run


@intrinsic
def _increment(typing, address):
    """Add 1 to the int64 at ``address`` atomically, and return the value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, int64(1), "seq_cst")

    return types.int64(types.intp), generate


@intrinsic
def _read(typing, address):
    """Return the int64 at ``address``, read atomically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.intp), generate


@intrinsic
def _pause(typing):
    """Wait for some cycles, in which another thread of the core can run."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _HAS_PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate
