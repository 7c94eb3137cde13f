"""Calls about weights that all workers of a replica receive from a trainer at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import grpc

from services.common.errors import TokaError
from services.common.rpc.channel import Dialer, task_is_cancelled
from services.scheduler.workers.upload import prepare, worker_error
from tokasaurus.common.v1 import shared_weights_pb2, weights_pb2
from tokasaurus.worker.v1 import broadcast_pb2, worker_pb2_grpc
from tokasaurus.worker.v1 import shared_weights_pb2 as worker_shared_pb2

if TYPE_CHECKING:
    from tokasaurus.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

_LEAVE_TIMEOUT_S = 10.0
_SINCE, _SINCE_SHARED = "2.4", "2.5"  # versions of the contract

Method = Callable[["WorkerServiceAsyncStub"], Callable[..., Awaitable[Any]]]
ErrorOf = Callable[[str, BaseException], TokaError]  # of a call to the worker at an address


class BroadcastCalls:
    """Calls to the workers at ``addresses``, over new connections. Used on the event loop.

    If a call fails, the others are cancelled, because a broadcast needs all ranks. If the caller is cancelled, all are.
    """

    def __init__(self, addresses: Sequence[str], dialer: Dialer) -> None:
        self._addresses, self._dialer = addresses, dialer

    async def join(self, group: weights_pb2.UpdateGroup) -> None:
        """Make all workers join ``group``. Raises ``TokaError``, the error of a worker."""
        request = broadcast_pb2.JoinUpdateGroupRequest(group=group)
        await self._call(lambda stub: stub.JoinUpdateGroup, request, _broadcast_error)

    async def leave(self, name: str) -> bool:
        """Make all workers leave a group, as far as they can be called. Return whether one was in it."""
        request = broadcast_pb2.LeaveUpdateGroupRequest(name=name)
        found = await asyncio.gather(*(self._leave(address, request) for address in self._addresses))
        return any(found)

    async def prepare(self, update_id: str) -> None:
        """Prepare the files of an update at one worker of each file system. Raises ``TokaError``."""
        async with AsyncExitStack() as opened:
            # One after the other, because each worker looks for a directory that another one has made.
            for address in self._addresses:
                channel = await opened.enter_async_context(self._dialer.open_aio(address))
                await prepare(address, worker_pb2_grpc.WorkerServiceStub(channel), update_id)

    async def receive(
        self, update_id: str, group: str, tensors: Iterable[weights_pb2.UploadedTensor], *, flat: bool
    ) -> broadcast_pb2.ReceiveWeightsResponse:
        """Make all workers receive ``tensors``. Return the response of the first. Raises ``TokaError``."""
        request = broadcast_pb2.ReceiveWeightsRequest(update_id=update_id, group=group, tensors=tensors, flat=flat)
        responses: list[broadcast_pb2.ReceiveWeightsResponse] = await self._call(
            lambda stub: stub.ReceiveWeights, request, _broadcast_error
        )
        return responses[0]

    async def copy(
        self,
        update_id: str,
        allocations: Iterable[shared_weights_pb2.SharedAllocation],
        tensors: Iterable[shared_weights_pb2.SharedTensor],
    ) -> worker_shared_pb2.CopySharedWeightsResponse:
        """Make all workers copy ``tensors``. Return the response of the first. Raises ``TokaError``."""
        request = worker_shared_pb2.CopySharedWeightsRequest(
            update_id=update_id, allocations=allocations, tensors=tensors
        )
        responses: list[worker_shared_pb2.CopySharedWeightsResponse] = await self._call(
            lambda stub: stub.CopySharedWeights, request, _shared_error
        )
        return responses[0]

    async def _call(self, method: Method, request: object, error_of: ErrorOf) -> list[Any]:
        """Return the response of each worker, in the order of ``addresses``. Raises the first error."""
        calls = [asyncio.create_task(self._call_one(each, method, request, error_of)) for each in self._addresses]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    async def _call_one(self, address: str, method: Method, request: object, error_of: ErrorOf) -> Any:
        async with self._dialer.open_aio(address) as channel:
            try:
                return await method(worker_pb2_grpc.WorkerServiceStub(channel))(request)
            except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and task_is_cancelled():
                    raise
                raise error_of(address, error) from error

    async def _leave(self, address: str, request: broadcast_pb2.LeaveUpdateGroupRequest) -> bool:
        async with self._dialer.open_aio(address) as channel:
            stub: WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                response: broadcast_pb2.LeaveUpdateGroupResponse = await stub.LeaveUpdateGroup(
                    request, timeout=_LEAVE_TIMEOUT_S
                )
            except grpc.RpcError:  # the worker is lost, and its group with it
                return False
            return response.left


def _broadcast_error(address: str, error: BaseException) -> TokaError:
    return worker_error(address, error, "broadcasts", _SINCE, "join a new group, and repeat the update")


def _shared_error(address: str, error: BaseException) -> TokaError:
    return worker_error(address, error, "shared memory", _SINCE_SHARED, "repeat the update")
