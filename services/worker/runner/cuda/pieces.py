"""Steps that are no decode graph, with CUDA graphs of what lies between their attentions ("piecewise").

What attention launches depends on a step's chunks and shared prefixes. All else, products, norms and what ranks
exchange, depends on the number of its tokens alone: so a step is padded to one of a few sizes.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from services.worker.attention.base import PreallocatedAttentionStep, RotatingAttentionStep
from services.worker.attention.compiled import deactivate
from services.worker.attention.cuda import CudaAttention
from services.worker.described.memory import kept_in_piece, piece_sizes
from services.worker.runner.cuda.graphs import Forward
from services.worker.runner.cuda.inputs import padded
from services.worker.runner.cuda.peers import NoPeers, Peers

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

# With more tokens the device takes longer for a layer than the host to launch it, also among several ranks: for so
# small a share of padding only are pieces still worth it.
_HOST_BOUND, _PADDING = 2048, 1 / 32


Launches = Callable[[RotatingAttentionStep], torch.Tensor]
Replay = Callable[[PreallocatedAttentionStep], None]


class StepPieces:
    """Launches a forward pass as CUDA graphs between its attentions. Owned by the compute thread.

    All ranks of a replica have the same sizes.
    """

    reuses_output = True  # the next step writes over the output

    def __init__(
        self,
        forward: Forward,
        attention: CudaAttention,
        peers: Peers | NoPeers,
        largest: int,
        device: torch.device,
    ) -> None:
        """For steps of up to ``largest`` tokens."""
        self._forward, self._attention, self._peers = forward, attention, peers
        self._sizes = sorted({padded(size, peers.grain) for size in piece_sizes(largest)})
        most = self._sizes[-1]
        # What all read: the stream has done with one step's before the next one's come.
        self._token_ids, self._positions = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._room = peers.room(most, device)
        self._pieces: dict[tuple[int, bool], _Piece] = {}
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # The largest first: the others find their memory in what it took.
        for size in reversed(self._sizes):
            self._pieces[size, True] = self._capture(size, None, pool, stream)
            if peers.last and (kept := kept_in_piece(size)) < size:
                # As positions, not at the begin of its memory, which compilers take for a kind of its own.
                keep = torch.zeros(2, kept, dtype=torch.int32, device=device)[1]
                self._pieces[size, False] = self._capture(size, keep, pool, stream)
        deactivate()

    def __len__(self) -> int:
        return len(self._pieces)

    def find(self, tokens: int) -> int | None:
        """Return the token count to which a step of ``tokens`` tokens is padded; None = an eager launch costs less."""
        if tokens > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, tokens)]
        return None if size > _HOST_BOUND and size - tokens > tokens * _PADDING else size

    def run(
        self,
        size: int,
        entering: torch.Tensor,
        positions: torch.Tensor,
        attention: PreallocatedAttentionStep,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Replay the pieces for ``size`` tokens; see ``EagerSteps.run``. ``positions`` is not read."""
        self._entering(size).copy_(entering)
        few = None if keep is None else self._pieces.get((size, False))
        if keep is not None and few is not None and few.keep is not None and len(keep) <= len(few.keep):
            few.keep[: len(keep)].copy_(keep)  # behind them are some of an earlier step of this size
            few.replay(attention)
            return few.leaving[: len(keep)]
        piece = self._pieces[size, True]
        piece.replay(attention)
        return piece.leaving if keep is None else piece.leaving.index_select(0, keep)

    def _entering(self, size: int) -> torch.Tensor:
        return self._token_ids[:size] if self._room is None else self._room[: self._peers.exchange(size).rows(size)]

    def _capture(
        self, size: int, keep: torch.Tensor | None, pool: "_POOL_HANDLE", stream: torch.cuda.Stream
    ) -> "_Piece":
        """``keep [n]`` int32: where it will be which tokens go on behind the last attention; None = all do."""
        inputs = self._entering(size), self._positions[:size]

        def launches(step: RotatingAttentionStep) -> torch.Tensor:
            return self._forward(*inputs, self._attention.active(step), keep, self._peers.exchange(size))

        width = self._attention.heads * self._attention.head_dim
        nothing = NoAttention(width)
        launches(nothing)  # lets libraries make their workspaces
        piece = _Piece(*capture_between(launches, width, pool, stream), keep)
        piece.replay(nothing)  # graphs are sent to the device when they are first launched
        return piece


class _Piece(NamedTuple):
    replay: Replay
    leaving: torch.Tensor
    keep: torch.Tensor | None


class NoAttention(PreallocatedAttentionStep):
    """Attends to nothing, and stores nothing."""

    def run_into(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        output: torch.Tensor,
    ) -> None:
        output.zero_()


class _Call(NamedTuple):
    """Of attention, as ``PreallocatedAttentionStep.run_into`` takes it."""

    layer_index: int
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    output: torch.Tensor


class _Cuts(PreallocatedAttentionStep):
    """In attention's place while a forward pass is captured: a graph ends before each, and the next begins behind."""

    def __init__(self, width: int, pool: "_POOL_HANDLE") -> None:
        super().__init__(width)
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[_Call] = []
        self._capturing = False

    def run_into(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        output: torch.Tensor,
    ) -> None:
        self.end()
        self._calls.append(_Call(layer_index, borrowed(qkv), q_norm, k_norm, eps, borrowed(output)))
        self.begin()

    def begin(self) -> None:
        """What is launched from here on belongs to the next graph."""
        self._graphs.append(torch.cuda.CUDAGraph())
        # Threads that look after collectives may ask for events meanwhile.
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._capturing = True

    def end(self) -> None:
        """The last graph has all its launches."""
        self._capturing = False
        self._graphs[-1].capture_end()

    def abandon(self) -> None:
        """After an error, which is what counts, not what comes of it here."""
        if self._capturing:
            with contextlib.suppress(RuntimeError):
                self.end()

    def replay(self, attention: PreallocatedAttentionStep) -> None:
        """The graphs, with ``attention`` between them."""
        first, *others = self._graphs
        first.replay()
        for call, graph in zip(self._calls, others, strict=True):
            attention.run_into(*call)
            graph.replay()


def capture_between(
    launches: Launches, width: int, pool: "_POOL_HANDLE", stream: torch.cuda.Stream
) -> tuple[Replay, torch.Tensor]:
    """What launches all of ``launches``, but each attention, whose output is ``width`` wide, anew; and where the
    outcome will be then, until something else of ``pool`` runs. ``stream``: one for all that share a pool's memory."""
    cuts = _Cuts(width, pool)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        cuts.begin()
        try:
            outcome = launches(cuts)
            cuts.end()
        except BaseException:
            cuts.abandon()
            raise
    torch.cuda.synchronize()
    return cuts.replay, borrowed(outcome)


class _Bytes:
    """What ``torch.as_tensor`` makes a tensor of without owning it (CUDA Array Interface, version 3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        place = {"data": (tensor.data_ptr(), False), "shape": (tensor.nbytes,), "strides": None}
        self.__cuda_array_interface__ = {"version": 3, "typestr": "|u1", **place}


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, on a device, without holding its memory: graphs use it again. Raises ``ValueError`` where it is not
    contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("what graphs hand on must be contiguous")
    return torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
