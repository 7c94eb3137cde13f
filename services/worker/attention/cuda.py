"""Attention on CUDA: norm, rotation and storing in one kernel, then shared prefixes, rows of one token, and chunks.

Nothing here waits for the device. Steps without chunks and groups depend on shapes and ``longest`` only, the rest being
read on the device, so they can be captured in a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.worker.attention import flashinfer_spans, triton_few
from services.worker.attention.base import PlacedAttentionStep, RotatingAttentionStep, layer_windows
from services.worker.attention.compiled import TraceableRotation, activate
from services.worker.attention.flashinfer_spans import FlashInferSpans
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.spans import Spans
from services.worker.attention.triton_decode import LONG, PrefixState, choose_splits, decode_attention
from services.worker.attention.triton_few import FewRowsStep
from services.worker.attention.triton_spans import TritonSpans
from services.worker.attention.triton_store import rotate_and_store
from services.worker.described.config import Windows
from services.worker.layers.rotary import Rotary

Put = Callable[[np.ndarray], torch.Tensor]

SPAN_BACKENDS = ("triton", "flashinfer-fa2", "flashinfer-fa3")


@dataclass(frozen=True)
class CudaBatch:
    """A step's tokens: rows of one token first, then the chunks. Tensors are on the device, spans on the host."""

    token_slots: torch.Tensor  # [tokens] int32, -1 = padding
    positions: torch.Tensor  # [tokens] int32, place in the sequence
    page_table: torch.Tensor  # [max_slots, max_pages] int32
    decodes: int  # rows of one token, padding included
    longest: int  # bound on their positions + 1
    chunks: Spans | None  # behind them
    groups: Spans | None  # among them, those that share a prefix; not all need to
    prefix_tokens: torch.Tensor | None  # [decodes] int32 beside groups, tokens of the row's prefix; 0 = in no group


class PlannedSpans(Protocol):
    """Spans that are ready to run, in any layer."""

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        window: int | None = None,
    ) -> None:
        """Attend; the shapes are in ``triton_spans``."""


class CudaAttention:
    """Bound to one cache, for ``heads`` query heads; one thread and one stream."""

    def __init__(
        self,
        cache: KvCache,
        heads: int,
        rotary: Rotary,
        *,
        dtype: torch.dtype | None = None,
        prefixes: str | None = None,
        chunks: str | None = None,
        windows: Windows = (),
        compiled: bool = False,
    ) -> None:
        """``dtype``: the model's; None = the cache's. ``prefixes`` and ``chunks``: of ``SPAN_BACKENDS``; None = the
        fastest that is installed. ``windows``: of the layers in ``cache``; () = no layer has one. ``compiled``: for a
        model under torch.compile."""
        self.cache, self.heads, self.tables = cache, heads, (rotary.cos, rotary.sin)
        self.windows = layer_windows(windows, cache)
        _, self.kv_heads, _, self.head_dim = cache.keys[0].shape
        cached = cache.keys[0].dtype
        self.dtype = dtype or cached
        if self.dtype != cached or not flashinfer_spans.available(self.head_dim, cached):
            prefixes = chunks = "triton"
        if any(self.windows):
            chunks = "triton"  # FlashInfer's plans would be one for each window
        prefixes, chunks = prefixes or fastest_spans(self.head_dim), chunks or fastest_spans(self.head_dim)
        self.backends = {"prefixes": prefixes, "chunks": chunks}
        self._workspace: torch.Tensor | None = None
        self._groups, self._chunks = self._spans(prefixes, causal=False), self._spans(chunks, causal=True)
        self._traceable = TraceableRotation(heads * self.head_dim) if compiled else None
        self._few_rows = triton_few.MOST_ROWS if self.dtype in (torch.bfloat16, torch.float16) else 0
        self._arrivals = triton_few.no_arrivals(self.kv_heads, cache.all_keys.device)

    def context_stages(self) -> list[int]:
        """The values of ``longest`` to capture graphs for, ascending; the last is the longest context there is. Only
        how many programs share a row depends on them, which for short contexts is not worth a graph."""
        most = self.tables[0].shape[0]
        return [LONG, most] if most > LONG else [most]

    @property
    def captures_groups(self) -> bool:
        """Whether steps with shared prefixes can be captured: their back end plans nothing on the host."""
        return self.shares_prefixes and isinstance(self._groups, TritonSpans)

    @property
    def shares_prefixes(self) -> bool:
        """True if any layer reads shared prefixes once for a group. Layers with a window read their own tokens only."""
        return None in self.windows

    def bytes_saved(self, groups: Spans) -> int:
        """Return the bytes of keys and values that a layer without a window does not read because rows of ``groups``
        share prefixes."""
        tokens = int(((groups.counts.astype(np.int64) - 1) * groups.contexts).sum())
        saved: int = tokens * 2 * self.kv_heads * self.head_dim * self.cache.keys[0].dtype.itemsize
        return saved

    def count_tiles(self, groups: Spans) -> int:
        """How many ``group_tiles`` there are."""
        return self._groups.count(groups)  # type: ignore[union-attr]  # as of ``captures_groups``

    def group_tiles(self, groups: Spans) -> np.ndarray:
        """``[tiles, TILE_FIELDS]`` int32, for ``prepare_captured``; a tile of zeros does nothing."""
        return self._groups.tiles(groups)  # type: ignore[union-attr]  # as of ``captures_groups``

    def splits(self, rows: int, longest: int) -> int:
        """Return the number of programs that share a row of one token in a step of ``rows`` such rows, in a layer
        whose rows attend to at most ``longest`` tokens."""
        if rows <= self._few_rows:
            return triton_few.choose_splits(max(1, rows), self.kv_heads, longest, self.head_dim)
        return choose_splits(rows, self.kv_heads, longest)

    def layer_splits(self, rows: int, longest: int) -> list[int]:
        """Return ``splits`` of each layer in a step whose longest context has ``longest`` tokens."""
        return [self.splits(rows, min(longest, window or longest)) for window in self.windows]

    def prepare_captured(self, batch: CudaBatch, tiles: torch.Tensor | None) -> RotatingAttentionStep:
        """A step of rows of one token under capture: all that changes between replays is in tensors. ``tiles``: of the
        groups, beside ``batch.prefix_tokens``."""
        if tiles is None and batch.decodes <= self._few_rows:
            tokens = batch.token_slots, batch.positions, batch.page_table
            splits = self.layer_splits(batch.decodes, batch.longest)
            return self.active(
                FewRowsStep(self.cache, self.heads, self.tables, *tokens, self._arrivals, self.windows, splits)
            )
        groups = None if tiles is None else self._groups.planned(tiles, batch.page_table)  # type: ignore[union-attr]
        return self.active(CudaAttentionStep(self, batch, groups, None))

    def prepare(self, batch: CudaBatch, host_page_table: np.ndarray | None, put: Put | None) -> "CudaAttentionStep":
        """The host's part of a step, before its upload is sent: ``put`` gives the view on the device where an int32
        array will be. A model is given it by ``active``.

        ``host_page_table [max_slots, max_pages]`` int32 as it will be on the device; both are None only for a batch
        without chunks and groups.
        """
        return CudaAttentionStep(self, batch, *self._plan(batch, host_page_table, put))

    def active(self, step: RotatingAttentionStep) -> RotatingAttentionStep:
        """What to call the model with, so that its attention is ``step``'s."""
        if self._traceable is None:
            return step
        activate(step)
        return self._traceable

    def _plan(
        self, batch: CudaBatch, host_page_table: np.ndarray | None, put: Put | None
    ) -> tuple[PlannedSpans | None, PlannedSpans | None]:
        """The batch's groups and chunks."""
        groups, chunks = (
            backend.plan(spans, batch.page_table, host_page_table, put) if spans is not None else None  # type: ignore[arg-type]
            for backend, spans in ((self._groups, batch.groups), (self._chunks, batch.chunks))
        )
        return groups, chunks

    def _spans(self, name: str, *, causal: bool) -> TritonSpans | FlashInferSpans:
        if name == "triton":
            return TritonSpans(self.heads // self.kv_heads, self.head_dim, self.dtype, causal=causal)
        if name not in SPAN_BACKENDS:
            raise ValueError(f"attention backend {name!r} does not exist; these do: {', '.join(SPAN_BACKENDS)}")
        if self._workspace is None:
            self._workspace = flashinfer_spans.make_workspace(self.cache.all_keys.device)
        backend = name.removeprefix("flashinfer-")
        return FlashInferSpans(self.cache, self.heads, backend, self._workspace, causal=causal)


def fastest_spans(head_dim: int) -> str:
    """As measured on an H200 in bfloat16 (docs/performance.md); by head dimension, which decides how much of the time
    goes to matrix products."""
    return "triton" if head_dim <= 64 else "flashinfer-fa3"


class CudaAttentionStep(PlacedAttentionStep):
    """One step, layer by layer: launches only."""

    def __init__(
        self,
        attention: CudaAttention,
        batch: CudaBatch,
        groups: PlannedSpans | None,
        chunks: PlannedSpans | None,
    ) -> None:
        super().__init__(attention.heads * attention.head_dim)
        self._attention, self._batch, self._groups, self._chunks = attention, batch, groups, chunks
        self._splits = attention.layer_splits(batch.decodes, batch.longest)

    def run_into(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        output: torch.Tensor,
    ) -> None:
        attention, batch, decodes = self._attention, self._batch, self._batch.decodes
        keys, values = attention.cache.keys[layer_index], attention.cache.values[layer_index]
        shape = (qkv.shape[0], attention.heads, attention.head_dim)
        queries, output = qkv.new_empty(shape), output.view(shape)
        norms: tuple[torch.Tensor, torch.Tensor] | None
        norms = None if q_norm is None else (q_norm, k_norm)  # type: ignore[assignment]  # both or neither
        tokens = (batch.token_slots, batch.positions, batch.page_table)
        rotate_and_store(qkv, *tokens, attention.tables, norms, eps, queries, keys, values, output)
        prefix, window, splits = None, attention.windows[layer_index], self._splits[layer_index]
        if self._groups is not None and window is None:
            found = qkv.new_empty((decodes, *shape[1:]))
            lse = torch.empty((decodes, attention.heads), dtype=torch.float32, device=qkv.device)
            self._groups.run(queries[:decodes], keys, values, found, lse)
            prefix = PrefixState(batch.prefix_tokens, found, lse)  # type: ignore[arg-type]  # there are groups
        if decodes:
            paged = queries, keys, values, *tokens
            decode_attention(*paged, output, rows=decodes, prefix=prefix, window=window, splits=splits)
        if self._chunks is not None:
            self._chunks.run(queries, keys, values, output, None, window)
