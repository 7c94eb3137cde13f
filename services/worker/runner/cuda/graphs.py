"""Decode steps of a few sizes as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from services.worker.attention.cuda import CudaAttention, CudaBatch
from services.worker.attention.spans import Spans
from services.worker.kv_cache import KvCache
from services.worker.runner.cuda.inputs import StepArrays, fill_up
from services.worker.runner.cuda.state import DeviceState
from services.worker.runner.cuda.state_kernels import gather_inputs
from services.worker.runner.slots import SlotTable
from services.worker.sampling.fused import FusedSampler
from services.worker.sampling.outcome import SampledOnDevice
from services.worker.sampling.rows import SampleRows

Put = Callable[[np.ndarray], torch.Tensor]
# (token_ids, positions, attention step, keep) -> hidden states of what is sampled
Forward = Callable[..., torch.Tensor]
Outcome = TypeVar("Outcome")

# Fewest rows of a graph with shared prefixes: with fewer, reading a prefix for every row costs less.
_FEWEST_GROUPED = 64


@dataclass(frozen=True)
class Kind:
    """What a graph is captured for."""

    size: int  # rows
    longest: int  # tokens of the longest context; only how many programs share a row depends on it
    grouped: bool  # with shared prefixes


@dataclass(frozen=True)
class StepInputs:
    """A decode step's tensors on the device, int32."""

    slots: torch.Tensor  # [size], -1 = padding
    positions: torch.Tensor  # [size]
    known: torch.Tensor  # [size], -1 = what the slot sampled last
    prefix_tokens: torch.Tensor | None  # [size], 0 = none; None without groups
    tiles: torch.Tensor | None  # of the groups, filled up with tiles of no rows

    def all(self) -> list[torch.Tensor]:
        """Those that are there."""
        tensors = (self.slots, self.positions, self.known, self.prefix_tokens, self.tiles)
        return [tensor for tensor in tensors if tensor is not None]


class DecodeGraph:
    """A step of one kind, captured twice: from tokens to tokens, where no row asks for more than a temperature, and to
    hidden states only. Inputs are copied to where the graphs read them, on the device."""

    def __init__(
        self,
        inputs: StepInputs,
        forward: Callable[[StepInputs], torch.Tensor],
        sampler: FusedSampler,
        table: SlotTable,
        pool,
    ) -> None:
        """``inputs`` stay where they are. ``pool``: the memory of all graphs."""
        self._inputs, device = inputs, inputs.slots.device
        nobody = np.empty(0, np.int64)
        size = len(inputs.slots)
        self._rows = sampler.prepare(table, nobody, nobody, lambda array: torch.from_numpy(array).to(device), size)
        for _ in range(2):  # compiles, and lets libraries make their workspaces
            sampler.run(forward(inputs), self._rows)
        torch.cuda.synchronize()
        self._forward, self._hidden = capture(lambda: forward(inputs), pool)
        self._whole, self._sampled = capture(lambda: sampler.run(forward(inputs), self._rows), pool)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states ``[size, hidden_size]``, overwritten by the next step."""
        torch._foreach_copy_(self._inputs.all(), inputs.all())
        self._forward()
        return self._hidden

    def run_whole(self, inputs: StepInputs, rows: SampleRows) -> SampledOnDevice:
        """Tokens of ``rows``, which are plain; overwritten by the next step."""
        torch._foreach_copy_(self._inputs.all() + _as_integers(self._rows), inputs.all() + _as_integers(rows))
        self._whole()
        return self._sampled


def _as_integers(rows: SampleRows) -> list[torch.Tensor]:
    """Scales and keys of one dtype with the other inputs: only then are all of them copied by one kernel."""
    return [rows.scales.view(torch.int32), rows.keys]


def capture(launches: Callable[[], Outcome], pool) -> tuple[Callable[[], None], Outcome]:
    """What launches all of ``launches`` at once, and where the outcome will be then."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outcome = launches()
    return graph.replay, outcome


class DecodeGraphs:
    """A step runs in the smallest graph that holds it. Owned by the compute thread."""

    def __init__(
        self,
        forward: Forward,
        skinny: Forward | None,
        cache: KvCache,
        attention: CudaAttention,
        sampler: FusedSampler,
        state: DeviceState,
        table: SlotTable,
        largest: int,
    ) -> None:
        """``skinny``: what runs steps of up to ``skinny.most_rows`` rows; None = ``forward`` runs them, too."""
        self._skinny = skinny
        self._forward, self._cache, self._attention, self._state = forward, cache, attention, state
        self._sizes = sizes_up_to(largest, smallest=8 if skinny is None else 1)
        self._stages = attention.context_stages()
        self._graphs: dict[Kind, DecodeGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others find their memory in what it took.
        for size in reversed(self._sizes):
            for kind in self._kinds(size):
                self._graphs[kind] = DecodeGraph(
                    self._empty(kind), lambda inputs, kind=kind: self._run(kind, inputs), sampler, table, pool
                )

    def __len__(self) -> int:
        return len(self._graphs)

    def kind_of(self, arrays: StepArrays) -> Kind | None:
        """Which graph runs such a step; None = no graph can."""
        size = next((size for size in self._sizes if size >= arrays.decodes), None)
        if size is None or arrays.chunks is not None or arrays.keep is not None:
            return None
        groups = arrays.groups
        if groups is None or size < _FEWEST_GROUPED or not self._attention.captures_groups:
            return Kind(size, self._stage(size, arrays.longest), grouped=False)
        if self._attention.count_tiles(groups) > _most_tiles(size):
            return None
        return Kind(size, self._stages[0], grouped=True)

    def put(self, kind: Kind, arrays: StepArrays, put: Put) -> StepInputs:
        """The step's arrays on their way to the device, filled up to the graph's size."""
        size = kind.size
        return StepInputs(
            put(fill_up(arrays.token_slots, size, -1)),
            put(fill_up(arrays.positions, size)),
            put(fill_up(arrays.known, size, -1)),
            put(fill_up(arrays.prefix_tokens, size)) if kind.grouped else None,
            put(self._tiles(arrays.groups, size)) if kind.grouped else None,
        )

    def graph(self, kind: Kind) -> DecodeGraph:
        """The one for ``kind``."""
        return self._graphs[kind]

    def _kinds(self, size: int) -> list[Kind]:
        stages = {self._stage(size, longest) for longest in self._stages}
        kinds = [Kind(size, longest, grouped=False) for longest in sorted(stages)]
        if size >= _FEWEST_GROUPED and self._attention.captures_groups:
            kinds.append(Kind(size, self._stages[0], grouped=True))
        return kinds

    def _stage(self, size: int, longest: int) -> int:
        """The shortest stage whose graph serves contexts of ``longest`` tokens as well as any."""
        needed = next((stage for stage in self._stages if stage >= longest), self._stages[-1])
        splits = self._attention.splits(size, needed)
        return next(stage for stage in self._stages if self._attention.splits(size, stage) == splits)

    def _tiles(self, groups: Spans, size: int) -> np.ndarray:
        return fill_up(self._attention.group_tiles(groups), _most_tiles(size))

    def _empty(self, kind: Kind) -> StepInputs:
        """Inputs of padding only."""

        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=self._state.page_table.device)

        size = kind.size
        slots, positions, known = full(-1, size), full(0, size), full(-1, size)
        if not kind.grouped:
            return StepInputs(slots, positions, known, None, None)
        nothing = self._attention.group_tiles(Spans(*[np.zeros(0, np.int32)] * 4))
        return StepInputs(slots, positions, known, full(0, size), full(0, _most_tiles(size), nothing.shape[1]))

    def _run(self, kind: Kind, inputs: StepInputs) -> torch.Tensor:
        slots, positions, table = inputs.slots, inputs.positions, self._state.page_table
        batch = CudaBatch(slots, positions, table, kind.size, kind.longest, None, None, inputs.prefix_tokens)
        step = self._attention.prepare_captured(batch, inputs.tiles)
        token_ids = gather_inputs(inputs.known, slots, positions, self._state.last_tokens, table, self._cache.tokens)
        skinny = self._skinny is not None and kind.size <= self._skinny.most_rows
        return (self._skinny if skinny else self._forward)(token_ids, positions, step, None)


def sizes_up_to(largest: int, smallest: int = 8) -> list[int]:
    """1, 2, 4, to 64 in steps of 8, to 256 in steps of 32, to 1,024 in steps of 64, then of 128; ascending from
    ``smallest`` on, the last one at least ``largest``."""
    sizes = [
        *(size for size in (1, 2, 4) if size >= smallest),
        *range(8, 64, 8),
        *range(64, 256, 32),
        *range(256, 1024, 64),
        *range(1024, largest + 128, 128),
    ]
    return [size for size in sizes if size < largest] + [next(size for size in sizes if size >= largest)]


def _most_tiles(size: int) -> int:
    """Tiles of the groups in a graph: enough for groups of 32 rows, which is what a tile holds at 4 heads a kv head."""
    return size // 16 + 8
