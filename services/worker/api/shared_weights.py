"""Reads the messages of CopySharedWeights."""

from collections.abc import Sequence

from services.common.errors import InvalidRequest
from services.worker.api.upload import read_tensors
from services.worker.arena.cuda_driver import HANDLE_BYTES
from services.worker.arena.cuda_ipc import SharedCopy
from services.worker.engine.shared_weights import SharedTensor
from tokasaurus.common.v1 import shared_weights_pb2 as common_pb2
from tokasaurus.worker.v1 import shared_weights_pb2


def read_shared(request: shared_weights_pb2.CopySharedWeightsRequest) -> dict[str, SharedTensor]:
    """Return the tensors by name. Raises ``InvalidRequest``, which names the tensor or the allocation."""
    for index, allocation in enumerate(request.allocations):
        if len(allocation.handle) != HANDLE_BYTES:
            raise InvalidRequest(
                f"the handle of allocation {index} has {len(allocation.handle)} bytes: expected a cudaIpcMemHandle_t of"
                f" {HANDLE_BYTES} bytes",
                field="allocations",
            )
    described = read_tensors((each.tensor for each in request.tensors), "tensors")
    return {
        name: SharedTensor(stored, _read_copies(name, tensor.copies, request.allocations))
        for (name, stored), tensor in zip(described.items(), request.tensors, strict=True)
    }


def _read_copies(
    name: str, copies: Sequence[common_pb2.SharedCopy], allocations: Sequence[common_pb2.SharedAllocation]
) -> list[SharedCopy]:
    if not copies:
        raise InvalidRequest(f"{name[:256]} has no copies: expected at least one", field="tensors")
    found = []
    for each in copies:
        if each.allocation >= len(allocations):
            raise InvalidRequest(
                f"{name[:256]} lies in allocation {each.allocation}, but the request has {len(allocations)}; send all"
                " allocations",
                field="tensors",
            )
        allocation = allocations[each.allocation]
        found.append(SharedCopy(allocation.handle, allocation.gpu_uuid, each.offset))
    return found
