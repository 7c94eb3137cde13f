"""Collectives over a stage's ranks as operators: opaque to torch.compile, and launches on the current stream on CUDA,
so that a compiled model stays one graph and a CUDA graph can hold them.

Owned by the compute thread: every rank calls the same operators in the same order. Compilers may swap two that do not
need each other's results, and ranks compile each for itself: so there must not be two such in a model.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from services.worker.parallel.errors import lost_peer

# By name, because operators take tensors, numbers and strings only.
_groups: dict[str, dist.ProcessGroup] = {}
# Named otherwise before torch 2.13.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

library = torch.library.Library("tokasaurus", "FRAGMENT")
library.define("all_reduce_(Tensor(a!) x, str group) -> ()")
library.define("gather_rows(Tensor x, SymInt rows, int size, str group) -> Tensor")
library.define("gather_quantized(Tensor x, Tensor scale, SymInt rows, int size, str group) -> (Tensor, Tensor)")
library.define("scatter_sums(Tensor x, int size, str group) -> Tensor")
library.define("gather_columns(Tensor x, int size, str group) -> Tensor")


def register(name: str, group: dist.ProcessGroup) -> None:
    """From here on operators find ``group`` by ``name``."""
    _groups[name] = group


def forget(name: str) -> None:
    """``name`` means nothing any more."""
    _groups.pop(name, None)


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have its ranks find each other: the first collective of a kind may wait for the others on the host, and must not
    be in a CUDA graph."""
    own, whole = torch.zeros(1, 1, device=device), torch.zeros(group.size(), 1, device=device)
    dist.all_reduce(own, group=group)
    _gather(whole, own, group=group)
    _scatter(own, whole, group=group)


def rows_each(rows: int, size: int) -> int:
    """How many of ``rows`` each of ``size`` ranks has; the last may have fewer, and rows that mean nothing."""
    return (rows + size - 1) // size


@contextlib.contextmanager
def among(name: str) -> Iterator[dist.ProcessGroup]:
    with lost_peer("a tensor-parallel rank"):
        yield _groups[name]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Backends copy no fp8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@torch.library.impl(library, "all_reduce_", "CompositeExplicitAutograd")
def _all_reduce(x: torch.Tensor, group: str) -> None:
    """``x``, of any shape, becomes the sum of all ranks' ``x``: the same bits everywhere."""
    with among(group) as ranks:
        dist.all_reduce(x, group=ranks)


@torch.library.register_fake("tokasaurus::all_reduce_", lib=library)
def _(x: torch.Tensor, group: str) -> None:
    return None


@torch.library.impl(library, "gather_rows", "CompositeExplicitAutograd")
def _gather_rows(x: torch.Tensor, rows: int, size: int, group: str) -> torch.Tensor:
    """The ranks' ``x [rows_each(rows, size), width]`` one below the other, ``[rows, width]``."""
    whole = x.new_empty(x.shape[0] * size, x.shape[1])
    with among(group) as ranks:
        _gather(_bytes(whole), _bytes(x.contiguous()), group=ranks)
    return whole[:rows]


@torch.library.register_fake("tokasaurus::gather_rows", lib=library)
def _(x: torch.Tensor, rows: int, size: int, group: str) -> torch.Tensor:
    return x.new_empty(rows, x.shape[1])


@torch.library.impl(library, "gather_quantized", "CompositeExplicitAutograd")
def _gather_quantized(
    x: torch.Tensor, scale: torch.Tensor, rows: int, size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gather_rows`` of both."""
    return _gather_rows(x, rows, size, group), _gather_rows(scale, rows, size, group)


@torch.library.register_fake("tokasaurus::gather_quantized", lib=library)
def _(x: torch.Tensor, scale: torch.Tensor, rows: int, size: int, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(rows, x.shape[1]), scale.new_empty(rows, scale.shape[1])


@torch.library.impl(library, "scatter_sums", "CompositeExplicitAutograd")
def _scatter_sums(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's ``[rows_each(rows, size), width]`` of the sum of all ranks' ``x [rows, width]``, with zeros behind
    the last row."""
    rows, each = x.shape[0], rows_each(x.shape[0], size)
    x = x.contiguous()
    if each * size != rows:
        padded = x.new_zeros(each * size, x.shape[1])
        padded[:rows] = x
        x = padded
    own = x.new_empty(each, x.shape[1])
    with among(group) as ranks:
        _scatter(own, x, group=ranks)
    return own


@torch.library.register_fake("tokasaurus::scatter_sums", lib=library)
def _(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return x.new_empty(rows_each(x.shape[0], size), x.shape[1])


@torch.library.impl(library, "gather_columns", "CompositeExplicitAutograd")
def _gather_columns(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The ranks' ``x [rows, width]`` side by side, ``[rows, size * width]``."""
    rows, width = x.shape
    whole = x.new_empty(size * rows, width)
    with among(group) as ranks:
        _gather(whole, x.contiguous(), group=ranks)
    return whole.view(size, rows, width).transpose(0, 1).reshape(rows, size * width)


@torch.library.register_fake("tokasaurus::gather_columns", lib=library)
def _(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], size * x.shape[1])
