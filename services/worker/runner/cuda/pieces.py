"""Piecewise CUDA graphs: the work between two attention calls is a graph, and attention is launched eagerly.

They serve steps with chunks or prefixes, which decode graphs do not support. The launches of attention depend on these.
All other launches depend only on the number of tokens, so a step is padded to one of a few sizes.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from services.common.boundaries import undo_on_error
from services.worker.attention.base import HeadNorms, PreallocatedAttentionStep, RotatingAttentionStep
from services.worker.attention.compiled import deactivate
from services.worker.attention.cuda import CudaAttention
from services.worker.described.memory import kept_in_piece, piece_sizes
from services.worker.runner.cuda.graphs import Forward
from services.worker.runner.cuda.inputs import padded
from services.worker.runner.peers import Peers

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

# With more than _HOST_BOUND tokens, the device takes longer for a layer than the host takes to launch it, even with
# several ranks. Then pieces are used only if they need no more than this share of padding. For mixtures of experts,
# the host launches more kernels, and the device reads only some of the weights.
_HOST_BOUND, _HOST_BOUND_OF_EXPERTS, _PADDING = 2048, 8192, 1 / 32

Launches = Callable[[RotatingAttentionStep], torch.Tensor]
Replay = Callable[[PreallocatedAttentionStep], None]


class StepPieces:
    """A launcher of forward passes as piecewise CUDA graphs. Owned by the compute thread.

    All ranks of a replica have the same sizes.
    """

    reuses_output = True  # the next step overwrites the output

    def __init__(
        self,
        forward: Forward,
        attention: CudaAttention,
        peers: Peers,
        largest: int,
        device: torch.device,
        *,
        has_experts: bool,
    ) -> None:
        """Capture the pieces of steps of up to ``largest`` tokens."""
        self._host_bound = _HOST_BOUND_OF_EXPERTS if has_experts else _HOST_BOUND
        self._forward, self._attention, self._peers = forward, attention, peers
        self._sizes = sorted({padded(size, peers.grain) for size in piece_sizes(largest)})
        most = self._sizes[-1]
        # Inputs of all pieces: the stream has read those of a step before it writes those of the next step.
        self._token_ids, self._positions = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._hidden = peers.input_buffer(most, device)
        self._pieces: dict[tuple[int, bool], _Piece] = {}
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # The largest piece is captured first, and smaller ones use its memory.
        for size in reversed(self._sizes):
            self._pieces[size, True] = self._capture(size, None, pool, stream)
            if peers.last and (kept := kept_in_piece(size)) < size:
                # Like positions, not at the start of its memory, for which compilers make separate code.
                keep = torch.zeros(2, kept, dtype=torch.int32, device=device)[1]
                self._pieces[size, False] = self._capture(size, keep, pool, stream)
        deactivate()

    def __len__(self) -> int:
        return len(self._pieces)

    def find(self, tokens: int) -> int | None:
        """Return the padded token count of a step of ``tokens`` tokens, or None if an eager launch is faster."""
        if tokens > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, tokens)]
        return None if size > self._host_bound and size - tokens > tokens * _PADDING else size

    def run(
        self,
        size: int,
        entering: torch.Tensor,
        positions: torch.Tensor,
        attention: PreallocatedAttentionStep,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Replay the pieces for ``size`` tokens; see ``EagerSteps.run``."""
        self._entering(size).copy_(entering)
        self._positions[:size].copy_(positions)  # the code of some models rotates queries and keys itself
        few = None if keep is None else self._pieces.get((size, False))
        if keep is not None and few is not None and few.keep is not None and len(keep) <= len(few.keep):
            few.keep[: len(keep)].copy_(keep)  # the rest keeps valid indices of an earlier step of this size
            few.replay(attention)
            return few.leaving[: len(keep)]
        piece = self._pieces[size, True]
        piece.replay(attention)
        return piece.leaving if keep is None else piece.leaving.index_select(0, keep)

    def _entering(self, size: int) -> torch.Tensor:
        return self._token_ids[:size] if self._hidden is None else self._hidden[: self._peers.exchange(size).rows(size)]

    def _capture(
        self, size: int, keep: torch.Tensor | None, pool: "_POOL_HANDLE", stream: torch.cuda.Stream
    ) -> "_Piece":
        """Capture the pieces for ``size`` tokens.

        ``keep [n]`` int32: input with the tokens that continue after the last attention; None = all tokens continue.
        """
        inputs = self._entering(size), self._positions[:size]

        def launches(step: RotatingAttentionStep) -> torch.Tensor:
            return self._forward(*inputs, self._attention.active(step), keep, self._peers.exchange(size))

        width = self._attention.heads * self._attention.head_dim
        nothing = NoAttention(width)
        launches(nothing)  # allocates the workspaces of libraries
        piece = _Piece(*capture_between(launches, width, pool, stream), keep)
        piece.replay(nothing)  # the first launch uploads the graphs
        return piece


class _Piece(NamedTuple):
    replay: Replay
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
