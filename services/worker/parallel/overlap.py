"""Matrix products that overlap with the exchange of their inputs or outputs ("async TP": Wang et al. 2023).

The functions are operators, as in ``operators``. Ranks exchange rows through memory that they read from each other: a
rank writes rows into its own buffer, and the others copy them with the device's copy engines, on a separate stream.

A rank may overwrite its buffer only after all ranks have read it. Each operator waits until all ranks have started it.
By then they have read the buffer of the previous operator, which is why each of the two operators has its own buffer.
So between two calls of one operator, every rank must call the other operator or another collective. Layers do this.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from services.worker.layers.operators import operator
from services.worker.parallel.operators import among

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory

# Views of the other ranks' buffers that are cached.
_MOST_VIEWS = 4096


class _Shared:
    """The buffers of one operator on the ranks of a group. Every rank reserves the same sizes in the same order."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._handle: _SymmetricMemory  # set by the first ``reserve``
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def reserve(self, count: int, like: torch.Tensor, ranks: dist.ProcessGroup) -> None:
        """Make room for ``count`` elements of the dtype of ``like``. Buffers grow only before graphs are captured."""
        size = count * like.itemsize
        if self._buffer is None or len(self._buffer) < size:
            self._views.clear()
            self._buffer = symmetric.empty(size, dtype=torch.uint8, device=like.device)
            self._handle = symmetric.rendezvous(self._buffer, ranks)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the buffer of ``rank``."""
        key = rank, shape, dtype
        if key not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = self._handle.get_buffer(rank, shape, dtype)
        return self._views[key]

    def wait_for_all(self) -> None:
        """Make the current stream wait until the streams of all ranks have reached this call."""
        self._handle.barrier(channel=0)

    def exchange_signals(self, target: int, source: int) -> None:
        """Make the current stream signal ``target``, and then wait for the signal of ``source``."""
        self._handle.put_signal(target, channel=1)
        self._handle.wait_signal(source, channel=1)


class _Lane:
    """The buffers, stream and events of the operators of one group. Owned by the compute thread."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self.rank, self.size = ranks.rank(), ranks.size()
        self.gathered, self.summed = _Shared(), _Shared()
        self.copies = torch.cuda.Stream()
        self.events = [torch.cuda.Event() for _ in range(self.size)]

    def others(self) -> list[int]:
        """Return the other ranks, in an order in which no two ranks read from the same one at a time."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


_lanes: dict[str, _Lane] = {}


def release(name: str) -> None:
    """Release the buffers of the group that is registered as ``name``, if there are any."""
    _lanes.pop(name, None)


def _lane(name: str, ranks: dist.ProcessGroup) -> _Lane:
    if name not in _lanes:
        _lanes[name] = _Lane(ranks)
    return _lanes[name]


@operator(
    "gather_product(Tensor x, Tensor matrix, int size, str group) -> Tensor",
    lambda x, matrix, size, group: x.new_empty(x.shape[0] * size, matrix.shape[1]),
    "CUDA",
)
def _gather_product(x: torch.Tensor, matrix: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return the concatenation of the ranks' ``x [rows, inputs]`` times ``matrix [inputs, outputs]``.

    The product is ``[size * rows, outputs]``. The rows of a rank are multiplied while those of the next one arrive.
    """
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
            for index, other in enumerate(lane.others()):
                arrived[index].copy_(lane.gathered.of(other, (rows, inputs), x.dtype))
                lane.events[index].record()
        torch.mm(x, matrix, out=product[lane.rank])
        for index, other in enumerate(lane.others()):
            main.wait_event(lane.events[index])
            torch.mm(arrived[index], matrix, out=product[other])
    return product.view(size * rows, -1)


@operator(
    "product_sums(Tensor x, Tensor matrix, int size, str group) -> Tensor",
    lambda x, matrix, size, group: x.new_empty(x.shape[0] // size, matrix.shape[1]),
    "CUDA",
)
def _product_sums(x: torch.Tensor, matrix: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return this rank's part of the sum over the ranks of ``x [rows, inputs]`` times ``matrix [inputs, outputs]``.

    The part is ``[rows / size, outputs]``; ``rows`` must be a multiple of ``size``. The part of a rank is sent while
    that of the next rank is multiplied.
    """
    parts = x.contiguous().view(size, -1, x.shape[1])
    shape = size, parts.shape[1], matrix.shape[1]
    with among(group) as ranks:
        lane = _lane(group, ranks)
        lane.summed.reserve(shape[0] * shape[1] * shape[2], x, ranks)
        own, main = lane.summed.of(lane.rank, shape, x.dtype), torch.cuda.current_stream()
        arrived = x.new_empty(size - 1, *shape[1:])
        for index, other in enumerate(lane.others()):
            torch.mm(parts[other], matrix, out=own[other])
            lane.events[index].record()
            # The rank that computes the part of this rank at the same time.
            source = (lane.rank - index - 1) % size
            with torch.cuda.stream(lane.copies):
                lane.copies.wait_event(lane.events[index])
                lane.summed.exchange_signals(other, source)
                arrived[index].copy_(lane.summed.of(source, shape, x.dtype)[lane.rank])
        total = torch.mm(parts[lane.rank], matrix)
        main.wait_stream(lane.copies)
        for part in arrived:
            total += part
    return total
