"""Times of kernels in CUDA graphs."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

import torch
from triton.errors import TritonError

T = TypeVar("T")
_ROUNDS = 5
_RUN_S = 0.05  # of a measurement, at least


class _Captured(NamedTuple):
    """A CUDA graph, and the results that it writes."""

    graph: torch.cuda.CUDAGraph
    results: list[object]


def graph_ms(run: Callable[[T], object], inputs: Sequence[T]) -> float | None:
    """Return ``run_in_graph``, or None if ``run`` cannot run. Then the reason is printed."""
    try:
        captured = _capture(run, inputs)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError, TritonError) as error:
        # The tile needs too much shared memory, or the library has no such kernel.
        print(f"  ({type(error).__name__}: {str(error).strip().splitlines()[0][:120]})", flush=True)
        return None
    return _replay(captured, _ROUNDS, _RUN_S)


def run_in_graph(
    run: Callable[[T], object], inputs: Sequence[T], *, rounds: int = _ROUNDS, seconds: float = _RUN_S
) -> float:
    """Return the milliseconds of ``run`` for one of ``inputs``, in a CUDA graph of all: the median of ``rounds``.

    With enough inputs, their weights do not stay in the L2 cache. All rounds together take at least ``seconds``.
    """
    return _replay(_capture(run, inputs), rounds, seconds)


def compile_in_processes(run: Callable[[T], None], cases: Sequence[T], processes: int) -> None:
    """Run each case in another process, so that its kernels are in Triton's cache. Print how long it took."""
    began = time.monotonic()
    with ProcessPoolExecutor(min(processes, len(cases)), mp_context=get_context("spawn")) as pool:
        for _ in pool.map(run, cases):
            pass
    print(f"kernels compiled in {time.monotonic() - began:.1f} s", flush=True)


def _capture(run: Callable[[T], object], inputs: Sequence[T]) -> _Captured:
    with torch.inference_mode():
        for each in inputs:
            run(each)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return _Captured(graph, [run(each) for each in inputs])


def _replay(captured: _Captured, rounds: int, seconds: float) -> float:
    times: list[float] = []
    count = 1
    while len(times) < rounds:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            captured.graph.replay()
        ended.record()
        ended.synchronize()
        if (elapsed := began.elapsed_time(ended)) < 1000 * seconds / rounds:
            count *= 2
        else:
            times.append(elapsed / count / len(captured.results))
    return sorted(times)[rounds // 2]
