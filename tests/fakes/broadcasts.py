"""Weights that a fake worker receives from a trainer. It needs the tensors "norm" and "scale".

The trainer is not there: a tensor that is described has arrived. The weights have the number that the shape of "norm"
names.
"""

from collections.abc import Awaitable, Callable

from services.common.errors import FailedPrecondition, InvalidRequest
from tests.fakes.uploads import FakeUploads
from tokasaurus.worker.v1 import broadcast_pb2, shared_weights_pb2

NAMES = "norm", "scale"
BAD_HANDLE = bytes(64)  # of memory that cannot be opened


class FakeBroadcasts(FakeUploads):
    """Base class of fake workers."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, int] = {}  # first rank of each group by name
        self.arrived: dict[str, list[str]] = {}  # names of the tensors of each update, by update id
        self.copied: list[shared_weights_pb2.CopySharedWeightsRequest] = []
        self.on_join: Callable[[], Awaitable[object] | None] = lambda: None
        self.on_receive: Callable[[], Awaitable[object] | None] = lambda: None  # called while a tensor is awaited

    async def JoinUpdateGroup(self, request, context):
        if not request.group.first_rank:
            raise InvalidRequest("expected at least 1", field="group.first_rank")
        if (waiting := self.on_join()) is not None:
            await waiting
        self.groups[request.group.name] = request.group.first_rank
        return broadcast_pb2.JoinUpdateGroupResponse()

    async def LeaveUpdateGroup(self, request, context):
        return broadcast_pb2.LeaveUpdateGroupResponse(left=self.groups.pop(request.name, None) is not None)

    async def ReceiveWeights(self, request, context):
        if request.group not in self.groups:
            raise FailedPrecondition(f"this worker is in no group {request.group!r}", field="group")
        missing = await self._arrive(request.update_id, request.tensors)
        return broadcast_pb2.ReceiveWeightsResponse(missing=len(missing), first_missing="".join(missing[:1]))

    async def CopySharedWeights(self, request, context):
        self.copied.append(request)
        if any(allocation.handle == BAD_HANDLE for allocation in request.allocations):
            raise InvalidRequest(f"{request.tensors[0].tensor.name}: its handle cannot be opened", field="tensors")
        missing = await self._arrive(request.update_id, [each.tensor for each in request.tensors])
        return shared_weights_pb2.CopySharedWeightsResponse(missing=len(missing), first_missing="".join(missing[:1]))

    async def _arrive(self, update_id: str, tensors) -> list[str]:
        """Keep ``tensors``. Return the names of those that are missing."""
        arrived = self.arrived.setdefault(update_id, [])
        for tensor in tensors:
            if tensor.name not in NAMES or tensor.name in arrived:
                raise InvalidRequest(f"{tensor.name} has no place or has arrived before", field="tensors")
            if (waiting := self.on_receive()) is not None:
                await waiting
            arrived.append(tensor.name)
            if tensor.name == "norm":
                self.uploads[update_id].chunks[0] = bytes(tensor.shape)
        return [name for name in NAMES if name not in arrived]

    def check_arrived(self, update_id: str) -> None:
        """Raise ``InvalidRequest`` if an update was received in part."""
        arrived = self.arrived.get(update_id, NAMES)
        for name in NAMES:
            if name not in arrived:
                raise InvalidRequest(f"{name} has not arrived", field="tensors")
