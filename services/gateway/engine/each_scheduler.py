"""Calls that concern the requests of all schedulers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.rpc.status import from_rpc_error
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica

if TYPE_CHECKING:
    from tokasaurus.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

NOT_CONNECTED = "NOT_CONNECTED"  # error reason

R = TypeVar("R")
# Returns the method of a stub.
Method = Callable[["SchedulerServiceAsyncStub"], Callable[..., Awaitable[R]]]


async def call_each(
    fleet: Fleet, method: Method[R], request: Any, *, since: str, timeout_s: float | None = 5.0
) -> Sequence[R | TokaError]:
    """Send ``request`` to every scheduler at the same time. Return the response or the error of each.

    A list of requests has one for each scheduler, in their order. ``since`` is the version of the contract with the
    method. ``timeout_s`` None: wait without a limit.
    """
    requests = request if isinstance(request, list) else [request] * len(fleet.replicas)
    pairs = zip(fleet.replicas, requests, strict=True)
    return await asyncio.gather(*(_call(replica, method, each, since, timeout_s) for replica, each in pairs))


async def call_all(
    fleet: Fleet, method: Method[R], request: Any, *, since: str, timeout_s: float | None = 5.0
) -> list[R]:
    """Return the response of every scheduler, as ``call_each``. Raises the first error."""
    responses = []
    for each in await call_each(fleet, method, request, since=since, timeout_s=timeout_s):
        if isinstance(each, TokaError):
            raise each
        responses.append(each)
    return responses


async def _call(
    replica: Replica, method: Method[R], request: Any, since: str, timeout_s: float | None
) -> R | TokaError:
    if (stub := replica.stub) is None:
        return Unavailable(f"scheduler {replica.address} is not connected; try again", reason=NOT_CONNECTED)
    try:
        return await method(stub)(request, metadata=replica.metadata(), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            advice = f"upgrade it to contract {since}"
            return FailedPrecondition(f"scheduler {replica.address} does not support this; {advice}")
        return from_rpc_error(error)
    except (grpc.aio.UsageError, asyncio.CancelledError):  # the channel was closed
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return Unavailable(f"the connection to scheduler {replica.address} has ended; try again")
