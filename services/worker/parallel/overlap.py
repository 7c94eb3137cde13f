"""Matrix products that go on while what they need arrives and what they gave is sent ("async TP": Wang et al. 2023),
through memory that the ranks of a stage read from each other. Operators, as in ``operators``.

A rank puts rows into its own memory and others copy them on a stream of their own, by the device's copy engines. A rank
writes over what it put there only when all have read it. Each operator waits until all ranks are at it, and by then
they have read what the operator before left, which is why the two have memory each: between two calls of either, every
rank must call the other one, or another collective. Layers do: they gather what they have scattered.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from services.worker.parallel.operators import among, library

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory

library.define("gather_product(Tensor x, Tensor matrix, int size, str group) -> Tensor")
library.define("product_sums(Tensor x, Tensor matrix, int size, str group) -> Tensor")

# Views of others' memory that are kept, of every rank and number of tokens.
_MOST_VIEWS = 4096


class _Shared:
    """Memory of one operator among the ranks of a group. Every rank asks for the same sizes in the same order."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._handle: _SymmetricMemory  # since the first ``reserve``
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def reserve(self, count: int, like: torch.Tensor, ranks: dist.ProcessGroup) -> None:
        """Have ``count`` elements as of ``like``. It only grows, and only before graphs are made."""
        size = count * like.itemsize
        if self._buffer is None or len(self._buffer) < size:
            self._views.clear()
            self._buffer = symmetric.empty(size, dtype=torch.uint8, device=like.device)
            self._handle = symmetric.rendezvous(self._buffer, ranks)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What ``rank`` has there."""
        key = rank, shape, dtype
        if key not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = self._handle.get_buffer(rank, shape, dtype)
        return self._views[key]

    def wait_for_all(self) -> None:
        """The current stream goes on when all ranks' are here."""
        self._handle.barrier(channel=0)

    def exchange_signals(self, target: int, source: int) -> None:
        """The current stream tells ``target`` that it is here, and goes on when ``source`` is."""
        self._handle.put_signal(target, channel=1)
        self._handle.wait_signal(source, channel=1)


class _Lane:
    """What the operators of one group have. Owned by the compute thread."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self.rank, self.size = ranks.rank(), ranks.size()
        self.gathered, self.summed = _Shared(), _Shared()
        self.copies = torch.cuda.Stream()
        self.events = [torch.cuda.Event() for _ in range(self.size)]

    def others(self) -> list[int]:
        """The other ranks, such that no two ranks read from the same one at a time."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


_lanes: dict[str, _Lane] = {}


def leave(name: str) -> None:
    """The group that operators know as ``name`` ends."""
    _lanes.pop(name, None)


def _lane(name: str, ranks: dist.ProcessGroup) -> _Lane:
    if name not in _lanes:
        _lanes[name] = _Lane(ranks)
    return _lanes[name]


@torch.library.impl(library, "gather_product", "CUDA")
def _gather_product(x: torch.Tensor, matrix: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The ranks' ``x [rows, inputs]`` one below the other, times ``matrix [inputs, outputs]``: a rank's rows are
    multiplied while those of the next one arrive."""
    x, (rows, inputs) = x.contiguous(), x.shape
    with among(group) as ranks:
        lane = _lane(group, ranks)
        lane.gathered.reserve(x.numel(), x, ranks)
        lane.gathered.of(lane.rank, (rows, inputs), x.dtype).copy_(x)
        lane.gathered.wait_for_all()
        main, product = torch.cuda.current_stream(), x.new_empty(size, rows, matrix.shape[1])
        arrived = x.new_empty(size - 1, rows, inputs)
        lane.copies.wait_stream(main)
        with torch.cuda.stream(lane.copies):
            for place, other in enumerate(lane.others()):
                arrived[place].copy_(lane.gathered.of(other, (rows, inputs), x.dtype))
                lane.events[place].record()
        torch.mm(x, matrix, out=product[lane.rank])
        for place, other in enumerate(lane.others()):
            main.wait_event(lane.events[place])
            torch.mm(arrived[place], matrix, out=product[other])
    return product.view(size * rows, -1)


@torch.library.register_fake("tokasaurus::gather_product", lib=library)
def _(x: torch.Tensor, matrix: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return x.new_empty(x.shape[0] * size, matrix.shape[1])


@torch.library.impl(library, "product_sums", "CUDA")
def _product_sums(x: torch.Tensor, matrix: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's ``[rows / size, outputs]`` of the sum of all ranks' ``x [rows, inputs]`` times ``matrix [inputs,
    outputs]``: what is another rank's is sent while the next is multiplied. ``rows`` is a multiple of ``size``."""
    parts = x.contiguous().view(size, -1, x.shape[1])
    shape = size, parts.shape[1], matrix.shape[1]
    with among(group) as ranks:
        lane = _lane(group, ranks)
        lane.summed.reserve(shape[0] * shape[1] * shape[2], x, ranks)
        own, main = lane.summed.of(lane.rank, shape, x.dtype), torch.cuda.current_stream()
        arrived = x.new_empty(size - 1, *shape[1:])
        for place, other in enumerate(lane.others()):
            torch.mm(parts[other], matrix, out=own[other])
            lane.events[place].record()
            # Whose part for this rank is ready just now.
            source = (lane.rank - place - 1) % size
            with torch.cuda.stream(lane.copies):
                lane.copies.wait_event(lane.events[place])
                lane.summed.exchange_signals(other, source)
                arrived[place].copy_(lane.summed.of(source, shape, x.dtype)[lane.rank])
        total = torch.mm(parts[lane.rank], matrix)
        main.wait_stream(lane.copies)
        for part in arrived:
            total += part
    return total


@torch.library.register_fake("tokasaurus::product_sums", lib=library)
def _(x: torch.Tensor, matrix: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return x.new_empty(x.shape[0] // size, matrix.shape[1])
