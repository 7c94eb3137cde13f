"""Collectives over the ranks of a stage, as operators.

They are opaque to torch.compile, so that a compiled model stays one graph. On CUDA they only launch work on the current
stream, so that a CUDA graph can contain them. Owned by the compute thread.

Every rank must call the same operators in the same order. Each rank compiles separately, and a compiler may swap two
operators that do not depend on each other. So the collectives of a model must form a chain.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from services.worker.layers.operators import operator
from services.worker.parallel.errors import lost_peer

# Groups by name, because arguments of operators are tensors, numbers or strings.
_groups: dict[str, dist.ProcessGroup] = {}
# These functions have other names before torch 2.13.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def register(name: str, group: dist.ProcessGroup) -> None:
    """Make ``group`` known to operators as ``name``."""
    _groups[name] = group


def unregister(name: str) -> None:
    """Remove ``name``, if it is registered."""
    _groups.pop(name, None)


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run each kind of collective once. The first run may block the host, which a CUDA graph does not allow."""
    own, whole = torch.zeros(1, 1, device=device), torch.zeros(group.size(), 1, device=device)
    dist.all_reduce(own, group=group)
    _gather(whole, own, group=group)
    _scatter(own, whole, group=group)


def rows_each(rows: int, size: int) -> int:
    """Return the rows of each of ``size`` ranks that share ``rows`` rows. The rows of the last rank may be padded."""
    return (rows + size - 1) // size


@contextlib.contextmanager
def among(name: str) -> Iterator[dist.ProcessGroup]:
    """Yield the group that is registered as ``name``. Failures inside raise ``ParallelError``."""
    with lost_peer("a tensor-parallel rank"):
        yield _groups[name]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return fp8 values as bytes, because backends do not copy fp8. Return other values unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@operator("all_reduce_(Tensor(a!) x, str group) -> ()", lambda x, group: None)
def _all_reduce(x: torch.Tensor, group: str) -> None:
    """Replace ``x``, of any shape, by the sum of all ranks' ``x``. All ranks have the same bits."""
    with among(group) as ranks:
        dist.all_reduce(x, group=ranks)


@operator(
    "gather_rows(Tensor x, SymInt rows, int size, str group) -> Tensor",
    lambda x, rows, size, group: x.new_empty(rows, x.shape[1]),
)
def _gather_rows(x: torch.Tensor, rows: int, size: int, group: str) -> torch.Tensor:
    """Concatenate the ranks' ``x [rows_each(rows, size), width]`` to ``[rows, width]``."""
    whole = x.new_empty(x.shape[0] * size, x.shape[1])
    with among(group) as ranks:
        _gather(_bytes(whole), _bytes(x.contiguous()), group=ranks)
    return whole[:rows]


@operator(
    "gather_quantized(Tensor x, Tensor scale, SymInt rows, int size, str group) -> (Tensor, Tensor)",
    lambda x, scale, rows, size, group: (x.new_empty(rows, x.shape[1]), scale.new_empty(rows, scale.shape[1])),
)
def _gather_quantized(
    x: torch.Tensor, scale: torch.Tensor, rows: int, size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``gather_rows`` of ``x`` and of ``scale``."""
    return _gather_rows(x, rows, size, group), _gather_rows(scale, rows, size, group)


@operator(
    "scatter_sums(Tensor x, int size, str group) -> Tensor",
    lambda x, size, group: x.new_empty(rows_each(x.shape[0], size), x.shape[1]),
)
def _scatter_sums(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return this rank's rows ``[rows_each(rows, size), width]`` of the sum of all ranks' ``x [rows, width]``.

    Rows behind the last one are zeros.
    """
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


@operator(
    "gather_columns(Tensor x, int size, str group) -> Tensor",
    lambda x, size, group: x.new_empty(x.shape[0], size * x.shape[1]),
)
def _gather_columns(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Concatenate the ranks' ``x [rows, width]`` along the last dimension, ``[rows, size * width]``."""
    rows, width = x.shape
    whole = x.new_empty(size * rows, width)
    with among(group) as ranks:
        _gather(whole, x.contiguous(), group=ranks)
    return whole.view(size, rows, width).transpose(0, 1).reshape(rows, size * width)
