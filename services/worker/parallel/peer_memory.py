"""A sum through memory that the ranks of a stage read from each other, over NVLink without its multicast.

The function is an operator, as in ``operators``. With 2, 4 or 8 ranks, every rank adds in the same order, so that all
have the same bits. With other numbers of ranks the bits may differ. Sampled tokens are still equal, because all ranks
sample from the same gathered logits.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from services.worker.layers.operators import operator
from services.worker.parallel.operators import among

# The buffer of each group, which the other ranks read. Buffers grow only before graphs are captured.
_buffers: dict[str, torch.Tensor] = {}


def join(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the ranks of ``group`` can read each other's memory. The result is the same on all ranks.

    All ranks must call this, in processes that see each other. If the result is True, the operators of this module and
    of ``overlap`` can be used.
    """
    here = torch.ones(1, device=device)
    try:
        total = _sum(here, group, group.group_name)
        reached = bool(total == group.size())
    except RuntimeError:  # the ranks are on several hosts, or the devices are not connected
        reached = False
    here.fill_(reached)
    dist.all_reduce(here, dist.ReduceOp.MIN, group=group)
    if not here:
        release(group.group_name)
    return bool(here)


def release(name: str) -> None:
    """Release the buffer of the group that torch calls ``name``, if there is one."""
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


@operator("sum_of_peers(Tensor x, str group) -> Tensor", lambda x, group: torch.empty_like(x), "CUDA")
def _sum_of_peers(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of all ranks' ``x``, which is contiguous, of any shape and a multiple of 16 bytes."""
    with among(group) as ranks:
        return _sum(x, ranks, ranks.group_name)
