"""CUDA graphs of forward passes with chunks or prefixes, which decode graphs do not support.

A step is padded to one of a few sizes. If the launches of its attention depend only on this size, the forward pass is
one graph. Otherwise it is piecewise: the work between two attentions is a graph, and attention is launched eagerly.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from services.common.boundaries import undo_on_error
from services.worker.attention.base import HeadNorms, PreallocatedAttentionStep, RotatingAttentionStep
from services.worker.attention.compiled import deactivate
from services.worker.attention.cuda import CudaAttention, CudaBatch, Put
from services.worker.attention.mixed import MixedInputs
from services.worker.described.memory import kept_in_piece, piece_sizes
from services.worker.runner.cuda.graphs import Forward, capture
from services.worker.runner.cuda.inputs import StepArrays, padded
from services.worker.runner.peers import Peers

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

# With more than _HOST_BOUND tokens, the device takes longer for a layer than the host takes to launch it, even with
# several ranks. Then pieces are used only if they need no more than this share of padding. For mixtures of experts,
# the host launches more kernels, and the device reads only some of the weights.
_HOST_BOUND, _HOST_BOUND_OF_EXPERTS, _PADDING = 2048, 8192, 1 / 32

Launches = Callable[[RotatingAttentionStep], torch.Tensor]
Replay = Callable[[PreallocatedAttentionStep], None]


class MixedBlock(NamedTuple):
    """The attention of a step whose forward pass is one graph."""

    values: torch.Tensor  # for ``MixedInputs.set``


Prepared = PreallocatedAttentionStep | MixedBlock


class StepPieces:
    """A launcher of forward passes as CUDA graphs. Owned by the compute thread.

    All ranks of a replica have the same sizes.
    """

    reuses_output = True  # the next step overwrites the output

    def __init__(
        self,
        forward: Forward,
        attention: CudaAttention,
        peers: Peers,
        largest: int,
        page_table: torch.Tensor,
        *,
        has_experts: bool,
    ) -> None:
        """Capture the graphs of steps of up to ``largest`` tokens. ``page_table``: see ``CudaBatch``."""
        self._host_bound = _HOST_BOUND_OF_EXPERTS if has_experts else _HOST_BOUND
        self._forward, self._attention, self._peers = forward, attention, peers
        self._sizes = sorted({padded(size, peers.grain) for size in piece_sizes(largest)})
        most, device = self._sizes[-1], page_table.device
        # Inputs of all graphs: the stream has read those of a step before it writes those of the next step.
        self._token_ids, self._positions = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._hidden = peers.input_buffer(most, device)
        self._graphs: dict[_Kind, _Graph] = {}
        self._mixed: dict[int, MixedInputs] = {}
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # The largest graph is captured first, and smaller ones use its memory.
        for size in reversed(self._sizes):
            keeps: list[torch.Tensor | None] = [None]
            if peers.last and (kept := kept_in_piece(size)) < size:
                # Like positions, not at the start of its memory, for which compilers make separate code.
                keeps.append(torch.zeros(2, kept, dtype=torch.int32, device=device)[1])
            for keep in keeps:
                self._capture_pieces(size, keep, pool, stream)
            if attention.captures_chunks and size <= self._host_bound:
                self._mixed[size] = attention.mixed_inputs(size)
                for keep in keeps:
                    self._capture_mixed(size, keep, page_table, pool, stream)
        deactivate()

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, tokens: int) -> int | None:
        """Return the padded token count of a step of ``tokens`` tokens, or None if an eager launch is faster."""
        if tokens > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, tokens)]
        return None if size > self._host_bound and size - tokens > tokens * _PADDING else size

    def prepare(
        self, size: int, arrays: StepArrays, batch: CudaBatch, host_page_table: np.ndarray, put: Put
    ) -> Prepared:
        """Prepare the attention of a step of ``size`` tokens; see ``EagerSteps.prepare``."""
        if (inputs := self._mixed.get(size)) is not None:
            block = self._attention.mixed_block(inputs, arrays.token_slots, batch)
            if block is not None:
                return MixedBlock(put(block))
        return self._attention.prepare(batch, host_page_table, put)

    def run(
        self,
        size: int,
        entering: torch.Tensor,
        positions: torch.Tensor,
        attention: Prepared,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Replay the graphs for ``size`` tokens; see ``EagerSteps.run``."""
        self._entering(size).copy_(entering)
        self._positions[:size].copy_(positions)  # the code of some models rotates queries and keys itself
        mixed = isinstance(attention, MixedBlock)
        few = None if keep is None else self._graphs.get(_Kind(size, mixed, trimmed=True))
        if keep is not None and few is not None and few.keep is not None and len(keep) <= len(few.keep):
            few.keep[: len(keep)].copy_(keep)  # the rest keeps valid indices of an earlier step of this size
            few.replay(attention)
            return few.leaving[: len(keep)]
        graph = self._graphs[_Kind(size, mixed, trimmed=False)]
        graph.replay(attention)
        return graph.leaving if keep is None else graph.leaving.index_select(0, keep)

    def _entering(self, size: int) -> torch.Tensor:
        return self._token_ids[:size] if self._hidden is None else self._hidden[: self._peers.exchange(size).rows(size)]

    def _launch(self, size: int, keep: torch.Tensor | None, step: RotatingAttentionStep) -> torch.Tensor:
        """Launch a forward pass.

        ``keep [n]`` int32: input with the tokens that continue after the last attention; None = all tokens continue.
        """
        active, exchange = self._attention.active(step), self._peers.exchange(size)
        return self._forward(self._entering(size), self._positions[:size], active, keep, exchange)

    def _capture_pieces(
        self, size: int, keep: torch.Tensor | None, pool: "_POOL_HANDLE", stream: torch.cuda.Stream
    ) -> None:
        """Capture the pieces for ``size`` tokens. ``keep``: see ``_launch``."""
        launches, width = partial(self._launch, size, keep), self._attention.heads * self._attention.head_dim
        nothing = NoAttention(width)
        launches(nothing)  # allocates the workspaces of libraries
        graph = _Graph(*capture_between(launches, width, pool, stream), keep)
        graph.replay(nothing)  # the first launch uploads the graphs
        self._graphs[_Kind(size, mixed=False, trimmed=keep is not None)] = graph

    def _capture_mixed(
        self,
        size: int,
        keep: torch.Tensor | None,
        page_table: torch.Tensor,
        pool: "_POOL_HANDLE",
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture the forward pass for ``size`` tokens with its attention. ``keep``: see ``_launch``."""
        inputs = self._mixed[size]
        step = self._attention.prepare_mixed(inputs, self._positions[:size], page_table)
        launches = partial(self._launch, size, keep, step)
        launches()  # compiles kernels
        replay_whole, leaving = capture_whole(launches, pool, stream)
        replay_whole()  # the first launch uploads the graph

        def replay(attention: MixedBlock) -> None:
            inputs.set(attention.values)
            replay_whole()

        graph = _Graph(replay, leaving, keep)
        self._graphs[_Kind(size, mixed=True, trimmed=keep is not None)] = graph


class _Kind(NamedTuple):
    size: int  # tokens
    mixed: bool  # one graph with attention, instead of pieces
    trimmed: bool  # few tokens continue after the last attention


class _Graph(NamedTuple):
    replay: Callable[[Any], None]  # takes the attention of the step
    leaving: torch.Tensor  # the output of the stage
    keep: torch.Tensor | None


class NoAttention(PreallocatedAttentionStep):
    """An attention that returns zeros and stores nothing."""

    def run_into(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None, output: torch.Tensor) -> None:
        output.zero_()


class _Call(NamedTuple):
    """The arguments of a call of ``PreallocatedAttentionStep.run_into``."""

    layer_index: int
    qkv: torch.Tensor
    norms: HeadNorms | None
    output: torch.Tensor


class _Cuts(PreallocatedAttentionStep):
    """A substitute for attention during a capture. Each call ends a graph and begins the next one."""

    def __init__(self, width: int, pool: "_POOL_HANDLE") -> None:
        super().__init__(width)
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[_Call] = []
        self._capturing = False

    def run_into(self, layer_index: int, qkv: torch.Tensor, norms: HeadNorms | None, output: torch.Tensor) -> None:
        self.end()
        self._calls.append(_Call(layer_index, borrowed(qkv), norms, borrowed(output)))
        self.begin()

    def begin(self) -> None:
        """Begin the next graph, which captures the following launches."""
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads, which monitor collectives, may query events during a capture.
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._capturing = True

    def end(self) -> None:
        """End the capture of the current graph."""
        self._capturing = False
        self._graphs[-1].capture_end()

    def abandon(self) -> None:
        """End the capture after an error. Errors of the capture itself are ignored."""
        if self._capturing:
            with contextlib.suppress(RuntimeError):
                self.end()

    def replay(self, attention: PreallocatedAttentionStep) -> None:
        """Replay the graphs, and call ``attention`` between them."""
        first, *others = self._graphs
        first.replay()
        for call, graph in zip(self._calls, others, strict=True):
            attention.run_into(*call)
            graph.replay()


def capture_between(
    launches: Launches, width: int, pool: "_POOL_HANDLE", stream: torch.cuda.Stream
) -> tuple[Replay, torch.Tensor]:
    """Capture ``launches`` as CUDA graphs split at each attention call, whose output is ``width`` wide.

    Return a function that replays them, and the output tensor, which is valid until another graph of ``pool`` runs. All
    captures of a pool must use the same ``stream``.
    """
    cuts = _Cuts(width, pool)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        cuts.begin()
        with undo_on_error(cuts.abandon):
            outcome = launches(cuts)
            cuts.end()
    torch.cuda.synchronize()
    return cuts.replay, borrowed(outcome)


def capture_whole(
    launches: Callable[[], torch.Tensor], pool: "_POOL_HANDLE", stream: torch.cuda.Stream
) -> tuple[Callable[[], None], torch.Tensor]:
    """Capture ``launches`` as one CUDA graph. The results are as those of ``capture_between``."""
    replay, outcome = capture(launches, pool, stream)
    return replay, borrowed(outcome)


class _Bytes:
    """The bytes of a tensor without ownership, for ``torch.as_tensor`` (CUDA Array Interface, version 3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        layout = {"data": (tensor.data_ptr(), False), "shape": (tensor.nbytes,), "strides": None}
        self.__cuda_array_interface__ = {"version": 3, "typestr": "|u1", **layout}


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor``, on a device, that does not own its memory, so that later graphs can reuse it.

    Raises ``ValueError`` if ``tensor`` is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError("a tensor that one piecewise graph passes to the next must be contiguous")
    return torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
