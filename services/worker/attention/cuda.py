"""Attention on CUDA: one kernel to normalise, rotate and store, then shared prefixes, decode rows and chunks.

A decode row has one token, and a chunk is a row of several tokens. No function waits for the device. The launches of a
step without groups depend only on shapes and ``longest``, so CUDA graphs can capture them. With chunks, this requires
the Triton kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from services.worker.attention import flashinfer_spans, triton_few
from services.worker.attention.base import (
    HeadNorms,
    LayerAttention,
    PreallocatedAttentionStep,
    RotatingAttentionStep,
    layer_rules,
)
from services.worker.attention.compiled import TraceableRotation, activate
from services.worker.attention.flashinfer_spans import FlashInferSpans
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.mixed import MixedInputs
from services.worker.attention.spans import TILE_FIELDS, Spans
from services.worker.attention.triton_decode import LONG_CONTEXT, PrefixState, choose_splits, decode_attention
from services.worker.attention.triton_prefixes import WidePrefixes
from services.worker.attention.triton_spans import TritonSpans
from services.worker.attention.triton_store import rotate_and_store
from services.worker.described.layer import AnyValue, SupportedValues
from services.worker.layers.cuda_devices import multiprocessors
from services.worker.layers.rotary import RotationTables

Put = Callable[[np.ndarray], torch.Tensor]

# A step's planned spans, by the name of the backend that runs them.
PlannedByName = Mapping[str, "PlannedSpans"]

_ANY_ROWS = 1 << 30  # exceeds the number of rows of any step
SPAN_BACKENDS = ("triton", "flashinfer-fa2", "flashinfer-fa3")

# The attention that ``CudaAttention`` computes. The layer adds biases, and normalises all heads together.
SUPPORTED: SupportedValues = {
    "qkv_bias": (False, True),
    "output_bias": (False, True),
    "qk_norm": ("none", "per_head", "whole"),
    "window": AnyValue(),
    "scale": AnyValue(),
    "soft_cap": AnyValue(),
    "sinks": (False, True),
    "rope": AnyValue(),
}


@dataclass(frozen=True)
class CudaBatch:
    """Tokens of a step: decode rows first, then chunks. Tensors are on the device, spans on the host."""

    token_slots: torch.Tensor  # [tokens] int32, -1 = padding
    positions: torch.Tensor  # [tokens] int32, position in the sequence
    page_table: torch.Tensor  # [max_slots, max_pages] int32
    decodes: int  # number of decode rows, including padding
    longest: int  # upper bound of the contexts of decode rows, in tokens
    chunks: Spans | None
    groups: Spans | None  # decode rows that share a prefix
    prefix_tokens: torch.Tensor | None  # [decodes] int32, tokens of the row's prefix, 0 = in no group; with groups only
    # [decodes] int32, -1 = no decode row; None = decode rows have the first of ``token_slots``
    decode_slots: torch.Tensor | None = None


class PlannedSpans(Protocol):
    """Spans prepared for a step. They can run in each layer."""

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        rules: LayerAttention,
    ) -> None:
        """Attend. Arguments are as in ``PlannedTiles.run`` of ``triton_spans``."""


class CudaAttention:
    """Attention over one cache with ``heads`` query heads, for one thread and one stream."""

    def __init__(
        self,
        cache: KvCache,
        heads: int,
        rotaries: Sequence[RotationTables],
        *,
        dtype: torch.dtype | None = None,
        prefixes: str | None = None,
        chunks: str | None = None,
        layers: Sequence[LayerAttention] = (),
        compiled: bool = False,
        most_rows: int = _ANY_ROWS,
    ) -> None:
        """Choose the backends.

        ``dtype`` is the model's; None means the cache's. ``prefixes`` and ``chunks`` are from ``SPAN_BACKENDS``; None
        chooses the fastest that is installed. Layers that it does not support use Triton. ``layers`` has an entry per
        layer of ``cache``, or is () for the default rules. Their ``rope`` is an index of ``rotaries``, of which there
        is at least one. ``compiled`` is true for use with torch.compile. ``most_rows`` is the largest number of decode
        rows in a step. Raises ``ValueError`` for an unknown backend.
        """
        self.cache, self.heads, self.layers = cache, heads, layer_rules(layers, cache)
        # The sinks of a layer count once, among the row's own tokens. Layers with a window ignore shared prefixes.
        self.prefix_rules = [None if rules.window else replace(rules, sinks=None) for rules in self.layers]
        self._tables = [(rotary.cos, rotary.sin) for rotary in rotaries]
        _, self.kv_heads, _, self.head_dim = cache.keys[0].shape
        cached, automatic = cache.keys[0].dtype, prefixes is None
        self.dtype = dtype or cached
        if self.dtype != cached or not flashinfer_spans.available(self.head_dim, cached):
            prefixes = chunks = "triton"
        fastest, self._scale = fastest_spans(self.head_dim), self.layers[0].scale
        self.prefix_names = [rules and self._span_backend(prefixes or fastest, rules) for rules in self.prefix_rules]
        self.chunk_names = [self._span_backend(chunks or fastest, rules) for rules in self.layers]
        self._workspace: torch.Tensor | None = None
        self._prefixes = {name: self._spans(name, causal=False) for name in self.prefix_names if name}
        self._chunks = {name: self._spans(name, causal=True) for name in self.chunk_names}
        sharing = [rules for rules in self.prefix_rules if rules is not None]
        supported = bool(sharing) and all(
            WidePrefixes.supports(cache, heads, self.dtype, rules, most_rows) for rules in sharing
        )
        self.wide_prefixes = WidePrefixes(cache, heads, self.dtype) if automatic and supported else None
        self._traceable = TraceableRotation(heads * self.head_dim) if compiled else None
        self._few_rows = triton_few.MOST_ROWS if self.dtype in (torch.bfloat16, torch.float16) else 0
        self._arrivals = triton_few.new_arrival_counters(self.kv_heads, cache.all_keys.device)

    def context_stages(self) -> list[int]:
        """Return the values of ``longest`` to capture graphs for, ascending. The last is the maximum context.

        Graphs differ only in the number of programs per row, which matters for long contexts only.
        """
        most = self._tables[0][0].shape[0]
        return [LONG_CONTEXT, most] if most > LONG_CONTEXT else [most]

    @property
    def captures_groups(self) -> bool:
        """True if graphs can capture steps with groups, because their backend does not plan on the host."""
        return self._prefixes.keys() == {"triton"}

    @property
    def captures_chunks(self) -> bool:
        """True if graphs can capture steps with chunks, because their backend does not plan on the host."""
        return self._chunks.keys() == {"triton"}

    @property
    def shares_prefixes(self) -> bool:
        """True if a layer reads shared prefixes once per group. Layers with a window ignore groups."""
        return bool(self._prefixes)

    def bytes_saved(self, groups: Spans) -> int:
        """Return the bytes of keys and values that ``groups`` save a layer without a window from reading."""
        tokens = int(((groups.counts.astype(np.int64) - 1) * groups.contexts).sum())
        saved: int = tokens * 2 * self.kv_heads * self.head_dim * self.cache.keys[0].dtype.itemsize
        return saved

    def group_tiles(self, groups: Spans) -> np.ndarray:
        """Return the tiles of ``groups`` for ``prepare_captured``, ``[tiles, TILE_FIELDS]`` int32.

        A tile of zeros has no effect. Needs ``captures_groups``.
        """
        return self._prefixes["triton"].tiles(groups)  # type: ignore[union-attr]

    def splits(self, rows: int, longest: int) -> int:
        """Return the number of programs per decode row and kv head in a layer.

        The step has ``rows`` decode rows, which attend to at most ``longest`` tokens in this layer.
        """
        if rows <= self._few_rows:
            pairs, keys = max(1, rows) * self.kv_heads, self.cache.all_keys
            options = triton_few.choose_options(pairs, self.head_dim, keys.dtype)
            return triton_few.choose_splits(pairs, longest, options.programs * multiprocessors(keys.device))
        return choose_splits(rows, self.kv_heads, longest)

    def layer_splits(self, rows: int, longest: int) -> list[int]:
        """Return ``splits`` of each layer for a step whose longest context has ``longest`` tokens."""
        return [self.splits(rows, min(longest, rules.window or longest)) for rules in self.layers]

    def tables(self, rules: LayerAttention) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the cosines and sines of a layer's rotation, or None if it has none."""
        return None if rules.rope is None else self._tables[rules.rope]

    def prepare_captured(self, batch: CudaBatch, tiles: torch.Tensor | None) -> RotatingAttentionStep:
        """Return the attention of decode rows for a CUDA graph, in which only tensors change between replays.

        ``tiles`` are the ``group_tiles`` of the groups, on the device, or None without groups.
        """
        if tiles is None and batch.decodes <= self._few_rows:
            return self.active(FewRowsStep(self, batch, self._arrivals))
        groups: PlannedByName = {}
        if tiles is not None:
            groups = {"triton": self._prefixes["triton"].planned(tiles, batch.page_table)}  # type: ignore[union-attr]
        return self.active(CudaAttentionStep(self, batch, groups, {}))

    def mixed_inputs(self, size: int) -> MixedInputs:
        """Return the inputs of a graph of ``size`` tokens with chunks. Needs ``captures_chunks``."""
        return MixedInputs(size, self._chunks["triton"].tile_tokens, self.cache.all_keys.device)  # type: ignore[union-attr]

    def prepare_mixed(
        self, inputs: MixedInputs, positions: torch.Tensor, page_table: torch.Tensor
    ) -> "CudaAttentionStep":
        """Return the attention of a CUDA graph for any step with ``inputs``, without groups and long contexts.

        ``positions [size]`` and ``page_table`` are as in ``CudaBatch``. The contexts of decode rows have at most
        ``context_stages()[0]`` tokens.
        """
        size, longest = len(positions), self.context_stages()[0]
        slots, decode_slots = inputs.token_slots, inputs.decode_slots
        batch = CudaBatch(slots, positions, page_table, size, longest, None, None, None, decode_slots)
        chunks = {"triton": self._chunks["triton"].planned(inputs.tiles, page_table)}  # type: ignore[union-attr]
        return CudaAttentionStep(self, batch, {}, chunks)

    def mixed_block(self, inputs: MixedInputs, token_slots: np.ndarray, batch: CudaBatch) -> np.ndarray | None:
        """Return the block of ``batch`` for ``inputs``, or None if the graph of ``prepare_mixed`` cannot serve it.

        ``token_slots [tokens]`` int32 are those of the batch, on the host, without padding.
        """
        if batch.groups is not None or batch.longest > self.context_stages()[0]:
            return None
        tiles, decodes = np.empty((0, TILE_FIELDS), np.int32), len(token_slots)
        if batch.chunks is not None:
            tiles, decodes = self._chunks["triton"].tiles(batch.chunks), batch.decodes  # type: ignore[union-attr]
        return inputs.block(token_slots, decodes, tiles)

    def prepare(self, batch: CudaBatch, host_page_table: np.ndarray | None, put: Put | None) -> "CudaAttentionStep":
        """Prepare the attention of ``batch`` on the host. Pass the result to the model through ``active``.

        ``host_page_table [max_slots, max_pages]`` int32 has the future values of the device's table. ``put`` queues an
        int32 array for the step's upload and returns its view on the device. Both may be None if the batch has no
        chunks and no groups.
        """
        return CudaAttentionStep(self, batch, *self._plan(batch, host_page_table, put))

    def active(self, step: RotatingAttentionStep) -> RotatingAttentionStep:
        """Return the attention argument with which the model runs ``step`` in the calling thread."""
        if self._traceable is None:
            return step
        activate(step)
        return self._traceable

    def _plan(
        self, batch: CudaBatch, host_page_table: np.ndarray | None, put: Put | None
    ) -> tuple[PlannedByName, PlannedByName]:
        """Return the planned groups and chunks of the batch."""
        wide, groups = self.wide_prefixes, batch.groups
        if groups is not None and wide is not None and wide.takes(groups):
            prefixes: PlannedByName = dict.fromkeys(self._prefixes, wide.plan(groups, batch.page_table, put))  # type: ignore[arg-type]  # set with groups
        else:
            prefixes = _plan_spans(self._prefixes, groups, batch, host_page_table, put)
        return prefixes, _plan_spans(self._chunks, batch.chunks, batch, host_page_table, put)

    def _span_backend(self, wanted: str, rules: LayerAttention) -> str:
        """Return the backend of a layer's spans: ``wanted``, or Triton for rules that FlashInfer does not support."""
        return wanted if flashinfer_spans.supports(rules, self._scale) else "triton"

    def _spans(self, name: str, *, causal: bool) -> TritonSpans | FlashInferSpans:
        if name == "triton":
            return TritonSpans(self.heads // self.kv_heads, self.head_dim, self.dtype, causal=causal)
        if name not in SPAN_BACKENDS:
            raise ValueError(f"attention backend {name!r} does not exist; these do: {', '.join(SPAN_BACKENDS)}")
        if self._workspace is None:
            self._workspace = flashinfer_spans.make_workspace(self.cache.all_keys.device)
        backend = name.removeprefix("flashinfer-")
        return FlashInferSpans(self.cache, self.heads, backend, self._workspace, self._scale, causal=causal)


def _plan_spans(
    backends: Mapping[str, TritonSpans | FlashInferSpans],
    spans: Spans | None,
    batch: CudaBatch,
    host_page_table: np.ndarray | None,
    put: Put | None,
) -> PlannedByName:
    """Return what each of ``backends`` plans for ``spans``. Empty without spans."""
    if spans is None:
        return {}
    return {
        name: backend.plan(spans, batch.page_table, host_page_table, put)  # type: ignore[arg-type]  # set with spans
        for name, backend in backends.items()
    }


def fastest_spans(head_dim: int) -> str:
    """Return the fastest backend for spans, as measured on an H200 in bfloat16 (docs/performance/kernels.md)."""
    return "triton" if head_dim <= 64 else "flashinfer-fa3"


class CudaAttentionStep(PreallocatedAttentionStep):
    """Attention of one step. Its methods only launch kernels."""

    def __init__(
        self,
        attention: CudaAttention,
        batch: CudaBatch,
        groups: PlannedByName,
        chunks: PlannedByName,
    ) -> None:
        """Keep the planned spans. ``groups`` and ``chunks`` are empty if the batch has none."""
        super().__init__(attention.heads * attention.head_dim)
        self._attention, self._batch, self._groups, self._chunks = attention, batch, groups, chunks
        self._splits = attention.layer_splits(batch.decodes, batch.longest)

    def run_into(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None, output: torch.Tensor) -> None:
        attention, batch, decodes = self._attention, self._batch, self._batch.decodes
        keys, values = attention.cache.keys[layer_index], attention.cache.values[layer_index]
        shape = (qkv.shape[0], attention.heads, attention.head_dim)
        queries, output = qkv.new_empty(shape), output.view(shape)
        tokens = (batch.token_slots, batch.positions, batch.page_table)
        decode_slots = batch.token_slots if batch.decode_slots is None else batch.decode_slots
        rules, prefix = attention.layers[layer_index], None
        rotate_and_store(qkv, *tokens, attention.tables(rules), norms, queries, keys, values, output)
        prefix_rules = attention.prefix_rules[layer_index]
        if self._groups and prefix_rules is not None:
            shared = qkv.new_empty((decodes, *shape[1:]))
            lse = torch.empty((decodes, attention.heads), dtype=torch.float32, device=qkv.device)
            groups = self._groups[attention.prefix_names[layer_index]]  # type: ignore[index]  # set with the rules
            groups.run(queries[:decodes], keys, values, shared, lse, prefix_rules)
            prefix = PrefixState(batch.prefix_tokens, shared, lse)  # type: ignore[arg-type]  # set with groups
        if decodes:
            paged, splits = (queries, keys, values, decode_slots, *tokens[1:]), self._splits[layer_index]
            decode_attention(*paged, output, rules, rows=decodes, prefix=prefix, splits=splits)
        if self._chunks:
            self._chunks[attention.chunk_names[layer_index]].run(queries, keys, values, output, None, rules)


class FewRowsStep(PreallocatedAttentionStep):
    """Attention of one step of up to ``triton_few.MOST_ROWS`` decode rows. Its methods only launch kernels."""

    def __init__(self, attention: CudaAttention, batch: CudaBatch, arrivals: torch.Tensor) -> None:
        """``arrivals`` is from ``new_arrival_counters``."""
        super().__init__(attention.heads * attention.head_dim)
        self._attention, self._batch, self._arrivals = attention, batch, arrivals
        self._splits = attention.layer_splits(batch.decodes, batch.longest)

    def run_into(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None, output: torch.Tensor) -> None:
        attention, batch = self._attention, self._batch
        tokens = batch.token_slots, batch.positions, batch.page_table
        cached = attention.cache.keys[layer_index], attention.cache.values[layer_index]
        output = output.view(len(qkv), attention.heads, attention.head_dim)
        rules, splits = attention.layers[layer_index], self._splits[layer_index]
        tables = attention.tables(rules)
        triton_few.few_attention(qkv, *tokens, tables, norms, *cached, output, self._arrivals, rules, splits=splits)
