"""Attention of many query tokens to one slot's pages, by FlashInfer."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from services.worker.attention.kv_cache import KvCache
from services.worker.attention.spans import Spans, offsets, packed, page_lists

_BUILT_KERNELS = "data/aot/*/*.so"
# What the kernels at hand were built for.
_HEAD_DIMS = (64, 128)
# Bytes for what split contexts leave to be merged; all users share it, one after the other on the stream.
_WORKSPACE = 256 << 20
# A plan is staged in its wrapper's one pinned buffer, which must not change before the device has read it.
_WRAPPERS = 4


def installed(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether FlashInfer is installed with built kernels, or with nvcc to build them, for these sizes.

    FlashInfer is not loaded.
    """
    if head_dim not in _HEAD_DIMS or dtype != torch.bfloat16:
        return False
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        return False
    [package, *_] = found.submodule_search_locations
    return shutil.which("nvcc") is not None or any(Path(package).glob(_BUILT_KERNELS))


def available(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether FlashInfer is installed for these sizes and can be loaded."""
    if not installed(head_dim, dtype):
        return False
    try:
        import flashinfer.prefill  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


class PlannedWrapper(NamedTuple):
    """Spans as FlashInfer takes them."""

    wrapper: Any  # of FlashInfer's, which has no types
    rows: slice | torch.Tensor  # query tokens that take part: a slice, or indices [rows] int64

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        window: int | None = None,
    ) -> None:
        """Attend into the spans' rows of ``output`` and, base 2, of ``lse [tokens, heads]`` float32. Raises
        ``ValueError`` for a ``window``: these plans are for all tokens.

        ``queries`` and ``output [tokens, heads, head_dim]``, ``keys`` and ``values [page_count, kv_heads, page_size,
        head_dim]``, contiguous and of one dtype. Rows between spans may be written, too.
        """
        if window is not None:
            raise ValueError("attention with a sliding window needs the triton backend")
        rows, wanted = self.rows, lse is not None
        if isinstance(rows, slice):
            part = None if lse is None else lse[rows]
            self.wrapper.run(queries[rows], (keys, values), out=output[rows], lse=part, return_lse=wanted)
            return
        found = self.wrapper.run(queries.index_select(0, rows), (keys, values), return_lse=wanted)
        if lse is not None:
            found, logs = found
            lse.index_copy_(0, rows, logs)
        output.index_copy_(0, rows, found)


class FlashInferSpans:
    """Plans on the thread that launches, on the stream that will run it; waits for the device only where a plan of
    ``_WRAPPERS`` steps before has not been read yet."""

    def __init__(self, cache: KvCache, heads: int, backend: str, workspace: torch.Tensor, *, causal: bool) -> None:
        """``backend``: fa2 or fa3. ``workspace``: of ``make_workspace``."""
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        keys = cache.keys[0]
        self._sizes, self._dtype, self._page_size = (heads, keys.shape[1], keys.shape[3]), keys.dtype, cache.page_size
        self._causal = causal
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend=backend) for _ in range(_WRAPPERS)
        ]
        self._staged = [torch.cuda.Event() for _ in range(_WRAPPERS)]
        self._next = 0

    def plan(
        self,
        spans: Spans,
        page_table: torch.Tensor,
        host_page_table: np.ndarray,
        put: Callable[[np.ndarray], torch.Tensor],
    ) -> PlannedWrapper:
        """``put`` takes an array to the device; the device's page table is not looked at."""
        turn, self._next = self._next, (self._next + 1) % _WRAPPERS
        wrapper, staged = self._wrappers[turn], self._staged[turn]
        staged.synchronize()
        lists = page_lists(spans, host_page_table, self._page_size)
        rows: slice | torch.Tensor
        if self._causal:  # chunks follow each other
            first = int(spans.starts[0])
            rows, starts = slice(first, first + int(spans.counts.sum())), offsets(spans.counts)
        else:
            found, starts = packed(spans)
            rows = found if isinstance(found, slice) else put(found)
        wrapper.plan(
            _pinned(starts),
            _pinned(lists.offsets),
            put(lists.pages),
            _pinned(lists.last_tokens),
            *self._sizes,
            self._page_size,
            causal=self._causal,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=_pinned(spans.contexts),
        )
        staged.record()
        return PlannedWrapper(wrapper, rows)


def make_workspace(device: torch.device) -> torch.Tensor:
    """For all that run on one stream."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _pinned(array: np.ndarray) -> torch.Tensor:
    """Copied to the device without waiting for it; freed only after that."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
