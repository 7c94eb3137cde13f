"""Attention of many query tokens to one slot's pages, by FlashInfer."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from services.worker.attention.base import LayerAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.spans import Spans, offsets, packed, page_lists

_BUILT_KERNELS = "data/aot/*/*.so"
# Head sizes of the kernels that FlashInfer ships built.
_HEAD_DIMS = (64, 128)
# Bytes for partial results of split contexts. All plans share it, since they run in sequence on one stream.
_WORKSPACE = 256 << 20
# Each wrapper stages its plan in a pinned buffer, which it must not change before the device has read it.
_WRAPPERS = 4


def installed(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether FlashInfer is installed with built kernels, or with nvcc to build them, for these sizes.

    FlashInfer is not loaded.
    """
    if head_dim not in _HEAD_DIMS or dtype != torch.bfloat16:
        return False
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        return False
    [package, *_] = spec.submodule_search_locations
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


def supports(rules: LayerAttention, scale: float) -> bool:
    """Return whether plans of ``scale`` compute attention by ``rules``. Other features must have their defaults.

    A plan is made for one scale and one window. Plans for each window would take time on the host in each step.
    """
    return rules == LayerAttention(scale, rope=rules.rope)


class PlannedWrapper(NamedTuple):
    """Spans of a step, planned by a wrapper of FlashInfer."""

    wrapper: Any  # FlashInfer has no types
    rows: slice | torch.Tensor  # query tokens in spans: a slice, or indices [rows] int64
    scale: float  # of the scores

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        rules: LayerAttention,
    ) -> None:
        """Attend, and write the rows of the spans to ``output`` and their log-sum-exp, base 2, to ``lse``.

        ``queries`` and ``output [tokens, heads, head_dim]``, and ``keys`` and ``values [page_count, kv_heads,
        page_size, head_dim]`` are contiguous and of one dtype. ``lse`` is ``[tokens, heads]`` float32. Rows between
        spans may be overwritten. Raises ``ValueError`` if ``supports(rules, scale)`` is false for the plan's scale.
        """
        if not supports(rules, self.scale):
            raise ValueError(
                f"{rules}: not supported by FlashInfer plans of scale {self.scale}; use the triton backend"
            )
        rows, return_lse = self.rows, lse is not None
        if isinstance(rows, slice):
            part = None if lse is None else lse[rows]
            self.wrapper.run(queries[rows], (keys, values), out=output[rows], lse=part, return_lse=return_lse)
            return
        attended = self.wrapper.run(queries.index_select(0, rows), (keys, values), return_lse=return_lse)
        if lse is not None:
            attended, logs = attended
            lse.index_copy_(0, rows, logs)
        output.index_copy_(0, rows, attended)


class FlashInferSpans:
    """Attention of spans by FlashInfer.

    Plans are made by the thread and on the stream that run them. ``plan`` blocks only if the device has not yet read
    the plan of ``_WRAPPERS`` steps before.
    """

    def __init__(
        self, cache: KvCache, heads: int, backend: str, workspace: torch.Tensor, scale: float, *, causal: bool
    ) -> None:
        """Create the wrappers.

        ``backend`` is fa2 or fa3, ``workspace`` is from ``make_workspace``, and ``scale`` is that of the scores.
        """
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        keys = cache.keys[0]
        self._sizes, self._dtype, self._page_size = (heads, keys.shape[1], keys.shape[3]), keys.dtype, cache.page_size
        self._causal, self._scale = causal, scale
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
        """Plan ``spans`` from ``host_page_table``. ``put`` copies an array to the device; ``page_table`` is unused."""
        index, self._next = self._next, (self._next + 1) % _WRAPPERS
        wrapper, staged = self._wrappers[index], self._staged[index]
        staged.synchronize()
        lists = page_lists(spans, host_page_table, self._page_size)
        rows: slice | torch.Tensor
        if self._causal:  # chunks are contiguous
            first = int(spans.starts[0])
            rows, starts = slice(first, first + int(spans.counts.sum())), offsets(spans.counts)
        else:
            selected, starts = packed(spans)
            rows = selected if isinstance(selected, slice) else put(selected)
        wrapper.plan(
            _pinned(starts),
            _pinned(lists.offsets),
            put(lists.pages),
            _pinned(lists.last_tokens),
            *self._sizes,
            self._page_size,
            causal=self._causal,
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=_pinned(spans.contexts),
        )
        staged.record()
        return PlannedWrapper(wrapper, rows, self._scale)


def make_workspace(device: torch.device) -> torch.Tensor:
    """Return a workspace for all plans of one stream."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _pinned(array: np.ndarray) -> torch.Tensor:
    """Return a pinned copy. Its copy to the device is asynchronous, and torch keeps the memory until it has ended."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
