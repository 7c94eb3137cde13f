"""Sends uploaded weights to the workers of a replica while they arrive."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc

from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.rpc.channel import Dialer
from services.common.rpc.fan_out import send_to_all
from services.common.rpc.status import from_rpc_error
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import weights_pb2 as worker_weights_pb2
from tokasaurus.worker.v1 import worker_pb2_grpc

if TYPE_CHECKING:
    from tokasaurus.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

_PREPARE_TIMEOUT_S = 10.0
_SINCE = "2.3"  # version of the contract


class Uploader:
    """Sends uploads to the workers at ``addresses``, over new connections. Used on the event loop."""

    def __init__(self, addresses: Sequence[str], dialer: Dialer) -> None:
        self._addresses, self._dialer = addresses, dialer

    async def send(
        self,
        update_id: str,
        tensors: Iterable[weights_pb2.UploadedTensor],
        chunks: AsyncIterator[weights_pb2.TensorChunk],
    ) -> None:
        """Send an upload to one worker of each file system. Return when these workers have written all chunks.

        Few chunks are in memory at a time. Raises ``TokaError``, the error of a worker. The caller must then discard
        the upload.
        """
        async with AsyncExitStack() as opened:
            calls = {}
            # One after the other, because each worker looks for a directory that another one has made.
            for address in self._addresses:
                channel = await opened.enter_async_context(self._dialer.open_aio(address))
                stub: WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
                if await prepare(address, stub, update_id):
                    calls[address] = stub.UploadWeights()
            header = worker_weights_pb2.UploadHeader(update_id=update_id, tensors=tensors)
            for each in await send_to_all(calls, _messages(header, chunks), _error):
                if isinstance(each, TokaError):
                    raise each


async def prepare(address: str, stub: "WorkerServiceAsyncStub", update_id: str) -> bool:
    """Return whether the worker has to receive the upload. Raises ``TokaError``."""
    request = worker_weights_pb2.PrepareUploadRequest(update_id=update_id)
    try:
        response: worker_weights_pb2.PrepareUploadResponse = await stub.PrepareUpload(
            request, timeout=_PREPARE_TIMEOUT_S
        )
    except grpc.RpcError as error:
        raise _error(address, error) from error
    return response.needed


async def _messages(
    header: worker_weights_pb2.UploadHeader, chunks: AsyncIterator[weights_pb2.TensorChunk]
) -> AsyncIterator[worker_weights_pb2.UploadWeightsRequest]:
    yield worker_weights_pb2.UploadWeightsRequest(header=header)
    async for chunk in chunks:
        yield worker_weights_pb2.UploadWeightsRequest(chunk=chunk)


def worker_error(address: str, error: BaseException, what: str, since: str, remedy: str) -> TokaError:
    """Return the error of a call to the worker at ``address``.

    Workers receive ``what`` from contract ``since`` on. ``remedy`` is for a connection that has ended.
    """
    if not isinstance(error, grpc.RpcError):
        return Unavailable(f"worker {address}: the connection has ended; {remedy}")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return FailedPrecondition(f"worker {address} does not receive {what}; upgrade it to contract {since}")
    found = from_rpc_error(error)
    found.message = f"worker {address}: {found.message}"
    return found


def _error(address: str, error: BaseException) -> TokaError:
    return worker_error(address, error, "uploads", _SINCE, "upload the weights again")
