"""Cancellation of any client's request from the console."""

import asyncio

import grpc

from services.common.errors import FailedPrecondition, NotFound, TokaError, Unavailable
from services.common.rpc.status import from_rpc_error
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica
from tokasaurus.scheduler.v1 import observe_pb2

_TIMEOUT_S = 5.0  # of an RPC


async def cancel_request(fleet: Fleet, request_id: str) -> int:
    """Cancel a request at all schedulers, since failover may have moved it. Return the number of cancelled samples.

    Raises ``NotFound``, or the error of a scheduler.
    """
    results = await asyncio.gather(*(_cancel_at(replica, request_id) for replica in fleet.replicas))
    if cancelled := sum(result for result in results if isinstance(result, int)):
        return cancelled
    if all(result is None for result in results):
        raise Unavailable("no scheduler is connected; try again")
    raise next(
        (result for result in results if isinstance(result, TokaError) and not isinstance(result, NotFound)),
        NotFound(f"no unfinished request has the id {request_id[:100]!r}", field="id", reason="REQUEST_NOT_FOUND"),
    )


async def _cancel_at(replica: Replica, request_id: str) -> int | TokaError | None:
    """Cancel a request at one scheduler. Return the number of samples, an error, or None if it is not connected."""
    if (stub := replica.stub) is None:
        return None
    request, metadata = observe_pb2.CancelRequestRequest(request_id=request_id), replica.metadata()
    try:
        return (await stub.CancelRequest(request, metadata=metadata, timeout=_TIMEOUT_S)).samples
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return FailedPrecondition(f"scheduler {replica.address} does not support this; upgrade it to contract 1.7")
        return from_rpc_error(error)
    except (grpc.aio.UsageError, asyncio.CancelledError):  # the channel was closed
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return Unavailable(f"the connection to scheduler {replica.address} has ended; try again")
