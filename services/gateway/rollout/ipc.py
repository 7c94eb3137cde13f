"""Weights in GPU memory that a trainer on the workers' host shares by CUDA IPC.

The bodies are those of vLLM's backend ``ipc``, except for the handles, which vLLM sends as a pickle.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.gateway.engine.each_scheduler import call_together
from services.gateway.engine.fleet import Fleet
from services.gateway.openai.body import Body, optional
from services.gateway.rollout.tensors import DtypeNames, Names, Shapes, described
from tokasaurus.scheduler.v1 import shared_weights_pb2

_SINCE = "1.15"  # version of the contract
_HANDLE_BYTES = 64
_FIELD = "update_info.ipc_handles"


class IpcHandle(Body):
    """A tensor in an allocation that the trainer shares."""

    handle: str = Field(max_length=128, description="cudaIpcMemHandle_t of the allocation, 64 bytes in Base64.")
    offset: int = Field(ge=0, lt=2**64, description="First byte of the tensor, from the start of the allocation.")


class IpcInitInfo(Body):
    """``init_info`` of the backend ``ipc``. It may be empty, as vLLM's."""

    backend: Literal["ipc"] = Field(default="ipc", description="The tensors come from shared memory.")


class IpcUpdateInfo(Body):
    """``update_info`` of the backend ``ipc``."""

    names: Names
    dtype_names: DtypeNames
    shapes: Shapes
    ipc_handles: list[Annotated[dict[str, IpcHandle], Field(min_length=1)]] | None = optional(
        "For each tensor, its place by the UUID of the GPU. A worker reads the copy on its own GPU, or the first one."
    )
    packed: bool = Field(default=False, description="Must be false: each tensor lies in memory as it is.")
    ipc_handles_pickled: Any = optional("Refused, because a pickle can run code.")

    def message(self) -> shared_weights_pb2.CopySharedWeightsRequest:
        """Return the tensors as a message to schedulers. Raises ``InvalidRequest``."""
        if self.ipc_handles_pickled is not None:
            raise UnsupportedParameter(
                "a Python pickle can run code and is not read here; send ipc_handles, for each tensor"
                ' {"GPU UUID": {"handle": "<Base64>", "offset": 0}}',
                field="update_info.ipc_handles_pickled",
            )
        if self.packed:
            raise UnsupportedParameter(
                "each tensor must lie in memory as it is, and several may lie in one allocation; send false",
                field="update_info.packed",
            )
        tensors = described(self.names, self.dtype_names, self.shapes, "update_info.dtype_names")
        handles = self.ipc_handles or []
        if len(handles) != len(tensors):
            raise InvalidRequest(
                f"{len(handles)} handles and {len(tensors)} names: expected one of each for every tensor", field=_FIELD
            )
        message = shared_weights_pb2.CopySharedWeightsRequest()
        numbers: dict[tuple[str, str], int] = {}  # of the allocations in the message, by handle and GPU
        for tensor, places in zip(tensors, handles, strict=True):
            shared = message.tensors.add(tensor=tensor)
            for uuid, place in places.items():
                number = numbers.setdefault((place.handle, uuid), len(numbers))
                if number == len(message.allocations):
                    message.allocations.add(handle=_read_handle(tensor.name, place.handle), gpu_uuid=uuid)
                shared.copies.add(allocation=number, offset=place.offset)
        return message


def by_backend(*marks: str) -> Discriminator:
    """Return the discriminator between the objects of both backends, whose tags are ``#ipc`` and ``#group``.

    An object without members, with one of the members ``marks``, or whose ``backend`` is ``ipc``, has the tag ``#ipc``.
    """

    def tag(value: Any) -> str:
        if not isinstance(value, Mapping):
            return "#group"
        named = value.get("backend") == "ipc" or any(mark in value for mark in marks)
        return "#ipc" if named or not value else "#group"

    return Discriminator(tag)


async def begin(fleet: Fleet) -> None:
    """Begin an update at all schedulers, and forget an unfinished one. Raises the error of a scheduler."""
    request = shared_weights_pb2.CopySharedWeightsRequest(begin=True)
    await copy(fleet, request)


async def copy(fleet: Fleet, request: shared_weights_pb2.CopySharedWeightsRequest) -> None:
    """Make all workers copy tensors. Raises the error of a scheduler. Then the update is forgotten."""
    async with fleet.updating:
        await call_together(fleet.replicas, lambda stub: stub.CopySharedWeights, request, since=_SINCE)


def _read_handle(name: str, text: str) -> bytes:
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # it has characters that are not ASCII
        handle = b""
    if len(handle) != _HANDLE_BYTES:
        raise InvalidRequest(
            f"the handle of {name[:256]} has {len(handle)} bytes: expected a cudaIpcMemHandle_t of {_HANDLE_BYTES}"
            " bytes in Base64; torch's own handles begin with further bytes, so leave these out",
            field=_FIELD,
        )
    return handle
