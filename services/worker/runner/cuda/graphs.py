"""Decode steps as CUDA graphs of a few sizes, which replace hundreds of launches by one."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from services.worker.attention.cuda import CudaAttention, CudaBatch
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.spans import Spans
from services.worker.described.memory import sizes_up_to
from services.worker.runner.cuda.block import Fields, Layout
from services.worker.runner.cuda.inputs import padded
from services.worker.runner.cuda.ring import Ring
from services.worker.runner.cuda.state import DeviceState
from services.worker.runner.cuda.state_kernels import advance, append_and_gather_inputs
from services.worker.runner.peers import Peers
from services.worker.runner.routed_experts import ExpertRecorder
from services.worker.sampling.fused import FusedSampler
from services.worker.step.slots import SlotTable

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

    from services.worker.models.skinny_cuda import SkinnyDecoder

# (token ids or hidden states, positions, attention step, keep, exchange) -> hidden states at the end of the stage
Forward = Callable[..., torch.Tensor]
Outcome = TypeVar("Outcome")

# Groups whose tiles are cached. More than the micro-batches of a step.
_MOST_TILED = 64
# Fewest rows of a graph with shared prefixes. With fewer rows, reading a prefix for every row is faster.
_FEWEST_GROUPED = 64
# Bytes that the device reads from its L2 cache, at 12 TB/s, in the 150 us that the host takes to launch the attention
# of a layer between piecewise graphs. If a graph that cannot share prefixes reads more, the pieces are faster.
_READ_MEANWHILE = 1.8e9


@dataclass(frozen=True)
class Kind:
    """The properties of steps that a graph serves."""

    size: int  # rows
    longest: int  # tokens of the longest context, which determines how many programs share a row
    grouped: bool  # with shared prefixes


class WholeStep(NamedTuple):
    """A captured step from its inputs to sampled tokens, for rows that need only a temperature."""

    replay: Callable[[], None]  # also stores the tokens as the slots' last tokens and as results
    token_ids: torch.Tensor  # [size] int32, overwritten by the next step


class DecodeGraph:
    """A step of one kind as CUDA graphs. One ends with hidden states; on a sampling stage, ``whole`` also samples.

    Both read their inputs from one block on the device. Each step in flight has its own block on the host.
    """

    def __init__(
        self,
        layout: Layout,
        forward: Callable[[Fields[torch.Tensor]], torch.Tensor],
        entering: torch.Tensor | None,
        sampler: FusedSampler | None,
        table: SlotTable,
        state: DeviceState,
        results: torch.Tensor,
        pool: "_POOL_HANDLE",
    ) -> None:
        """Capture the graphs.

        ``entering``: buffer for the hidden states of the previous stage; None on the first stage. ``sampler``: None on
        a stage that does not sample. ``results [places, max_slots]``: pinned memory. ``pool``: memory of all graphs.
        """
        device = state.page_table.device
        self._block, self._entering = layout.empty(device), entering
        self.size, self.grouped = layout.size, layout.tiles is not None
        self.inputs = inputs = layout.fields(self._block)
        self._host = [layout.empty(torch.device("cpu"), pinned=device.type == "cuda") for _ in range(len(results))]
        self._fields = [layout.fields(block.numpy()) for block in self._host]

        def hidden() -> torch.Tensor:
            return forward(inputs)

        whole = None if sampler is None else self._through(sampler, hidden, table, state, results)
        for _ in range(2):  # compile kernels, and allocate the workspaces of libraries
            (whole or hidden)()
        torch.cuda.synchronize()
        self._forward, self._hidden = capture(hidden, pool)
        self.whole = None if whole is None else WholeStep(*capture(whole, pool))

    def _through(
        self,
        sampler: FusedSampler,
        hidden: Callable[[], torch.Tensor],
        table: SlotTable,
        state: DeviceState,
        results: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        """Return a function that launches a whole step and returns its token ids, ``[size]`` int32."""
        inputs, no_rows = self.inputs, np.empty(0, np.int64)
        device = self._block.device
        rows = sampler.prepare(table, no_rows, no_rows, lambda array: torch.from_numpy(array).to(device), self.size)
        rows = replace(rows, scales=inputs.scales, keys=inputs.keys)

        def whole() -> torch.Tensor:
            sampled = sampler.run(hidden(), rows)
            advance(sampled.token_ids, sampled.finite, inputs.slots, state.last_tokens, results.view(-1), inputs.where)
            return sampled.token_ids

        return whole

    def fields(self, place: int) -> Fields[np.ndarray]:
        """Return the host's block of the step at ``place``. It has the values of an earlier step."""
        return self._fields[place]

    def send(self, place: int) -> None:
        """Copy the host's block to the device, on the current stream."""
        self._block.copy_(self._host[place], non_blocking=True)

    def enter(self, entering: torch.Tensor | None) -> None:
        """Copy the hidden states of the previous stage, ``[rows, hidden_size]``. None on the first stage."""
        if entering is not None and self._entering is not None:
            self._entering.copy_(entering)

    def run(self) -> torch.Tensor:
        """Return the stage's output ``[size, hidden_size]``, which the next step overwrites."""
        self._forward()
        return self._hidden


def capture(
    launches: Callable[[], Outcome], pool: "_POOL_HANDLE", stream: torch.cuda.Stream | None = None
) -> tuple[Callable[[], None], Outcome]:
    """Capture ``launches`` as one CUDA graph. Return a function that replays it, and its output.

    All captures of a pool must use the same ``stream``. None = torch's stream for captures.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, which monitor collectives, may query events during a capture.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        outcome = launches()
    return graph.replay, outcome


class FoundGraph(NamedTuple):
    """The graph for a step."""

    graph: DecodeGraph
    tiles: np.ndarray | None  # [tiles, TILE_FIELDS] int32 of the step's groups; None without groups


class DecodeGraphs:
    """The decode graphs of all sizes. A step runs in the smallest graph that fits. Owned by the compute thread."""

    def __init__(
        self,
        forward: Forward,
        skinny: "SkinnyDecoder | None",
        cache: KvCache,
        attention: CudaAttention,
        sampler: FusedSampler | None,
        state: DeviceState,
        table: SlotTable,
        ring: Ring,
        largest: int,
        peers: Peers,
        *,
        pads: bool,
        keeps_size: bool = False,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        """Capture the graphs for up to ``largest`` rows.

        ``skinny`` runs steps of up to ``skinny.most_rows`` rows, if every rank has all of them; None = ``forward`` runs
        them. ``sampler``: None on a stage that does not sample. If ``pads`` is false, ``forward`` also runs steps of 1,
        2 and 4 rows. ``keeps_size``: groups do not change the padded size. ``recorder``: stores the experts of each
        step; None = they are not kept.
        """
        self._skinny, self._peers, self._recorder, self._keeps_size = skinny, peers, recorder, keeps_size
        self._forward, self._cache, self._attention, self._state = forward, cache, attention, state
        sizes = sizes_up_to(largest, smallest=8 if skinny is None and pads else 1)
        few = [size for size in sizes if skinny is not None and size <= skinny.most_rows]
        self._most_skinny = max((size for size in few if not peers.exchange(size).shares_rows), default=0)
        grain = peers.grain if pads else peers.tp_size
        self._sizes = sizes = sorted({size if size <= self._most_skinny else padded(size, grain) for size in sizes})
        buffer = peers.input_buffer(sizes[-1], state.page_table.device)
        self._stages = attention.context_stages()
        self._graphs: dict[Kind, DecodeGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # The largest graph is captured first, and smaller ones use its memory.
        for size in reversed(self._sizes):
            for kind in self._kinds(size):
                entering = None if buffer is None else buffer[: peers.exchange(size).rows(size)]
                self._graphs[kind] = DecodeGraph(
                    Layout(size, _most_tiles(size) if kind.grouped else None),
                    lambda inputs, kind=kind, entering=entering: self._run(kind, inputs, entering),  # type: ignore[misc]
                    entering,
                    sampler,
                    table,
                    state,
                    ring.host_results,
                    pool,
                )
        self._tiles: dict[int, tuple[Spans, np.ndarray]] = {}  # by the groups' identity
        # By size: the longest context in tokens and the graph without groups, in ascending order.
        self._plain = {
            size: [(stage, self._graphs[Kind(size, self._stage(size, stage), grouped=False)]) for stage in self._stages]
            for size in self._sizes
        }

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, rows: int, longest: int, groups: Spans | None, pieces: bool = False) -> FoundGraph | None:
        """Return the graph for ``rows`` rows of one token, the longest of which sees ``longest`` tokens.

        None means that there is no such graph, or that reading the prefixes of ``groups`` once is faster.
        ``pieces``: the step can run as piecewise graphs.
        """
        if rows > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, rows)]
        graphs = self._plain[size]
        plain = FoundGraph(next((graph for stage, graph in graphs if stage >= longest), graphs[-1][1]), None)
        if groups is None:
            return plain
        if not self._attention.captures_groups:
            leaves = pieces and self._attention.bytes_saved(groups) > _READ_MEANWHILE
        elif size < _FEWEST_GROUPED:
            leaves = False
        elif len(tiles := self._group_tiles(groups)) <= _most_tiles(size):
            return FoundGraph(self._graphs[Kind(size, self._stages[0], True)], tiles)
        else:
            leaves = True
        return None if leaves and not self._keeps_size else plain

    def _group_tiles(self, groups: Spans) -> np.ndarray:
        """Return the tiles of ``groups``, which are the same for many steps."""
        if id(groups) not in self._tiles:
            if len(self._tiles) == _MOST_TILED:
                del self._tiles[next(iter(self._tiles))]
            self._tiles[id(groups)] = groups, self._attention.group_tiles(groups)
        return self._tiles[id(groups)][1]

    def _kinds(self, size: int) -> list[Kind]:
        stages = {self._stage(size, longest) for longest in self._stages}
        kinds = [Kind(size, longest, grouped=False) for longest in sorted(stages)]
        if size >= _FEWEST_GROUPED and self._attention.captures_groups:
            kinds.append(Kind(size, self._stages[0], grouped=True))
        return kinds

    def _stage(self, size: int, longest: int) -> int:
        """Return the shortest context length whose graph is the same as for ``longest`` tokens."""
        needed = next((stage for stage in self._stages if stage >= longest), self._stages[-1])
        splits = self._attention.splits(size, needed)
        return next(stage for stage in self._stages if self._attention.splits(size, stage) == splits)

    def _run(self, kind: Kind, inputs: Fields[torch.Tensor], entering: torch.Tensor | None) -> torch.Tensor:
        slots, positions, state = inputs.slots, inputs.positions, self._state
        batch = CudaBatch(slots, positions, state.page_table, kind.size, kind.longest, None, None, inputs.prefix_tokens)
        step = self._attention.prepare_captured(batch, inputs.tiles)
        appended = inputs.append_slots, inputs.append_places, inputs.append_pages
        token_ids = append_and_gather_inputs(
            appended, inputs.known, slots, positions, state.last_tokens, state.page_table, self._cache.tokens
        )
        exchange = self._peers.exchange(kind.size)
        if self._skinny is not None and kind.size <= self._most_skinny:
            return self._skinny(token_ids, positions, step, None, exchange)
        entering = token_ids if entering is None else entering
        leaving = self._forward(entering, positions, step, None, exchange)
        if self._recorder is not None:
            self._recorder.store_at(slots, positions, state.page_table)
        return leaving


def _most_tiles(size: int) -> int:
    """Return the capacity of a graph for tiles. It is enough for groups of 32 rows, a tile at 4 heads per KV head."""
    return size // 16 + 8
