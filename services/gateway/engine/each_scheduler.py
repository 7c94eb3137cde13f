"""Calls to several schedulers at the same time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.rpc.channel import task_is_cancelled
from services.common.rpc.fan_out import send_to_all
from services.common.rpc.status import from_rpc_error
from services.gateway.engine.replica import Replica

if TYPE_CHECKING:
    from tokasaurus.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

NOT_CONNECTED = "NOT_CONNECTED"  # error reason

R = TypeVar("R")
# Returns the method of a stub.
Method = Callable[["SchedulerServiceAsyncStub"], Callable[..., Awaitable[R]]]


async def call_each(
    replicas: Sequence[Replica], method: Method[R], request: Any, *, since: str, timeout_s: float | None = 5.0
) -> Sequence[R | TokaError]:
    """Send ``request`` to the schedulers of ``replicas`` at the same time. Return the response or the error of each.

    A list of requests has one for each scheduler, in their order. ``since`` is the version of the contract with the
    method. ``timeout_s`` None: wait without a limit.
    """
    requests = request if isinstance(request, list) else [request] * len(replicas)
    pairs = zip(replicas, requests, strict=True)
    return await asyncio.gather(*(_call(replica, method, each, since, timeout_s) for replica, each in pairs))


async def call_all(
    replicas: Sequence[Replica], method: Method[R], request: Any, *, since: str, timeout_s: float | None = 5.0
) -> list[R]:
    """Return the response of every scheduler, as ``call_each``. Raises the first error."""
    responses = []
    for each in await call_each(replicas, method, request, since=since, timeout_s=timeout_s):
        if isinstance(each, TokaError):
            raise each
        responses.append(each)
    return responses


async def call_together(replicas: Sequence[Replica], method: Method[R], request: Any, *, since: str) -> list[R]:
    """Return the response of every scheduler to a call that only ends if all schedulers take part.

    The arguments are those of ``call_each``. If a call fails, the others are cancelled and its error is raised. If this
    task is cancelled, all calls are.
    """
    requests = request if isinstance(request, list) else [request] * len(replicas)
    pairs = zip(replicas, requests, strict=True)
    calls = [asyncio.create_task(_call(replica, method, each, since, None)) for replica, each in pairs]
    try:
        for call in asyncio.as_completed(calls):
            if isinstance(result := await call, TokaError):
                raise result
    finally:
        for each in calls:
            each.cancel()
        await asyncio.wait(calls)
    return [call.result() for call in calls]  # type: ignore[misc]  # none is an error


async def stream_to_each(
    replicas: Sequence[Replica], method: Method[R], messages: AsyncIterator[Any], *, since: str
) -> Sequence[R | TokaError]:
    """Send ``messages`` to every scheduler. Return the response or the error of each scheduler, in their order.

    ``method`` returns the method of a stub that takes a stream of requests. The next message is read when every
    scheduler has taken the previous one. If a scheduler fails before it has all messages, its error is raised and all
    calls are cancelled.
    """
    calls: dict[str, Any] = {}
    for replica in replicas:
        if (stub := replica.stub) is None:
            raise _not_connected(replica.address)
        try:
            calls[replica.address] = method(stub)(metadata=replica.metadata())
        except grpc.aio.UsageError:
            raise _closed(replica.address) from None
    return await send_to_all(calls, messages, lambda address, error: _error(address, error, since))


async def call_one(
    replica: Replica, method: Method[R], request: Any, *, since: str, timeout_s: float | None = 5.0
) -> R:
    """Return the response of one scheduler. Raises its error. The other arguments are those of ``call_each``."""
    response = await _call(replica, method, request, since, timeout_s)
    if isinstance(response, TokaError):
        raise response
    return response


async def _call(
    replica: Replica, method: Method[R], request: Any, since: str, timeout_s: float | None
) -> R | TokaError:
    if (stub := replica.stub) is None:
        return _not_connected(replica.address)
    try:
        return await method(stub)(request, metadata=replica.metadata(), timeout=timeout_s)
    except grpc.RpcError as error:
        return _error(replica.address, error, since)
    except (grpc.aio.UsageError, asyncio.CancelledError):  # the channel was closed
        if task_is_cancelled():
            raise
        return _closed(replica.address)


def _error(address: str, error: Exception, since: str) -> TokaError:
    if not isinstance(error, grpc.RpcError):  # the channel was closed
        return _closed(address)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return FailedPrecondition(f"scheduler {address} does not support this; upgrade it to contract {since}")
    return from_rpc_error(error)


def _not_connected(address: str) -> Unavailable:
    return Unavailable(f"scheduler {address} is not connected; try again", reason=NOT_CONNECTED)


def _closed(address: str) -> Unavailable:
    return Unavailable(f"the connection to scheduler {address} has ended; try again")
