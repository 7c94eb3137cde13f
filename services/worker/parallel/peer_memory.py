"""Sums through memory that the ranks of a stage read from each other, over NVLink without its multicast. An operator,
as in ``operators``.

Ranks add in the order of the ranks, whoever adds, so that all have the same bits, where they are 2, 4 or 8; where they
are others, tokens are the same all the same, since ranks sample from logits that they put together.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from services.worker.parallel.operators import among, library

# Of each group, what its ranks put values into for the others to read. It only grows, and only before graphs are made.
_buffers: dict[str, torch.Tensor] = {}

library.define("sum_of_peers(Tensor x, str group) -> Tensor")


def join(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of ``group``, processes that see each other, can read each other's memory; the same answer on
    all of them, which all call it.

    From here on the operator, and those of ``overlap``, may be used, where it is True.
    """
    here = torch.ones(1, device=device)
    try:
        total = _sum(here, group, group.group_name)
        reached = bool(total == group.size())
    except RuntimeError:  # other hosts, or no way from one device to another
        reached = False
    here.fill_(reached)
    dist.all_reduce(here, dist.ReduceOp.MIN, group=group)
    if not here:
        leave(group.group_name)
    return bool(here)


def leave(name: str) -> None:
    """The group of this name, torch's own, ends."""
    _buffers.pop(name, None)


def _sum(x: torch.Tensor, ranks: dist.ProcessGroup, name: str) -> torch.Tensor:
    size = x.numel() * x.itemsize
    buffer = _buffers.get(name)
    if buffer is None or len(buffer) < size:
        buffer = _buffers[name] = symmetric.empty(size, dtype=torch.uint8, device=x.device)
        symmetric.rendezvous(buffer, ranks)
    total = torch.empty_like(x)
    torch.ops.symm_mem.one_shot_all_reduce_copy_out(
        buffer[:size].view(x.dtype), x.view(-1), "sum", name, total.view(-1)
    )
    return total


@torch.library.impl(library, "sum_of_peers", "CUDA")
def _sum_of_peers(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of all ranks' contiguous ``x``, of any shape, a multiple of 16 bytes."""
    with among(group) as ranks:
        return _sum(x, ranks, ranks.group_name)


@torch.library.register_fake("tokasaurus::sum_of_peers", lib=library)
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)
