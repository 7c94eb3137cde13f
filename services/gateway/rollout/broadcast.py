"""Weights that a trainer broadcasts to the workers of all schedulers."""

from collections.abc import Sequence
from typing import NamedTuple

from services.common.errors import InvalidRequest
from services.gateway.engine.each_scheduler import call_all, call_each, call_together
from services.gateway.engine.fleet import Fleet
from services.gateway.rollout import control
from services.gateway.rollout.lease import updating
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import broadcast_pb2, control_pb2

_SINCE = "1.14"  # version of the contract
_SINCE_WEIGHTS = "1.12"


class Bucket(NamedTuple):
    """Tensors that a trainer broadcasts together."""

    group: str
    tensors: Sequence[weights_pb2.UploadedTensor]
    flat: bool = False  # as one tensor with the bytes of all
    version: str = ""  # empty: not known yet


async def count_workers(fleet: Fleet) -> list[int]:
    """Return the number of workers of each scheduler. Raises the error of a scheduler."""
    request = control_pb2.GetWeightsRequest()
    responses = await call_all(
        fleet.replicas, lambda stub: stub.GetWeights, request, since=_SINCE_WEIGHTS, timeout_s=None
    )
    return [len(each.ranks) for each in responses]


async def join(fleet: Fleet, group: weights_pb2.UpdateGroup) -> int:
    """Make all workers join ``group``, with consecutive ranks from its ``first_rank`` on. Return their number.

    Raises ``InvalidRequest``, and the error of a scheduler. Then no worker is in the group.
    """
    counts = await count_workers(fleet)
    if group.first_rank + sum(counts) > group.world_size:
        raise InvalidRequest(
            f"world_size is {group.world_size}, but {sum(counts)} workers join from rank {group.first_rank} on:"
            f" expected at least {group.first_rank + sum(counts)}",
            field="world_size",
        )
    requests = []
    for index in range(len(counts)):
        request = broadcast_pb2.JoinUpdateGroupRequest(group=group)
        request.group.first_rank += sum(counts[:index])
        requests.append(request)
    await call_together(fleet.replicas, lambda stub: stub.JoinUpdateGroup, requests, since=_SINCE)
    return sum(counts)


async def leave(fleet: Fleet, name: str) -> bool:
    """Make all workers leave a group. Return whether one was in it. Raises the error of a scheduler."""
    request = broadcast_pb2.LeaveUpdateGroupRequest(name=name)
    responses = await call_all(
        fleet.replicas, lambda stub: stub.LeaveUpdateGroup, request, since=_SINCE, timeout_s=None
    )
    return any(each.left for each in responses)


async def begin(fleet: Fleet, group: str) -> None:
    """Begin an update at all schedulers, and forget an unfinished one. Raises the error of a scheduler."""
    request = broadcast_pb2.ReceiveWeightsRequest(group=group, begin=True)
    async with fleet.updating:
        await call_together(fleet.replicas, lambda stub: stub.ReceiveWeights, request, since=_SINCE)


async def receive(fleet: Fleet, bucket: Bucket) -> tuple[int, str]:
    """Receive tensors of the present update. Return the number of missing tensors of the model, and the first name.

    Raises the error of a scheduler. Then the update is forgotten and the group closed.
    """
    async with fleet.updating:
        return await _receive(fleet, bucket)


async def receive_and_commit(
    fleet: Fleet, bucket: Bucket, version: str, mode: control.PauseMode
) -> tuple[int, str] | None:
    """Receive tensors as ``receive`` does. If none is missing then, commit the update and return None."""
    async with updating(fleet):
        missing, first = await _receive(fleet, bucket)
        if missing:
            return missing, first
        await _commit(fleet, version, mode)
        return None


async def commit(fleet: Fleet, version: str, mode: control.PauseMode) -> None:
    """Replace the weights of all workers by those that they have received.

    Raises the error of a scheduler, which names a tensor that has not arrived.
    """
    async with updating(fleet):
        await _commit(fleet, version, mode)


async def _receive(fleet: Fleet, bucket: Bucket) -> tuple[int, str]:
    request = broadcast_pb2.ReceiveWeightsRequest(**bucket._asdict())
    responses = await call_together(fleet.replicas, lambda stub: stub.ReceiveWeights, request, since=_SINCE)
    most = max(responses, key=lambda each: each.missing)
    return most.missing, most.first_missing


async def _commit(fleet: Fleet, version: str, mode: control.PauseMode) -> None:
    request = control_pb2.StageWeightsRequest(received=True, version=version)
    staged = await call_each(fleet.replicas, lambda stub: stub.StageWeights, request, since=_SINCE, timeout_s=None)
    await control.commit_staged(fleet, staged, mode)
