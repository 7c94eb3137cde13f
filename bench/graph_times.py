"""Times of kernels in CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from triton.errors import TritonError

T = TypeVar("T")
_ROUNDS = 5
_RUN_S = 0.05  # of a measurement, at least


def graph_ms(run: Callable[[T], object], inputs: Sequence[T]) -> float | None:
    """Return the milliseconds of ``run`` for one of ``inputs``, in a CUDA graph of all, or None if it cannot run.

    With enough inputs, their weights do not stay in the L2 cache.
    """
    try:
        with torch.inference_mode():
            for each in inputs:
                run(each)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = [run(each) for each in inputs]
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError, TritonError) as error:
        # The tile needs too much shared memory, or the library has no such kernel.
        print(f"  ({type(error).__name__}: {str(error).strip().splitlines()[0][:120]})", flush=True)
        return None
    times: list[float] = []
    count = 1
    while len(times) < _ROUNDS:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            graph.replay()
        ended.record()
        ended.synchronize()
        if began.elapsed_time(ended) < 1000 * _RUN_S / _ROUNDS:
            count *= 2
        else:
            times.append(began.elapsed_time(ended) / count / len(kept))
    return sorted(times)[_ROUNDS // 2]
