"""A request of the console's list is cancelled at its scheduler, whoever sent it."""

import asyncio

import grpc

from services.common.errors import FailedPrecondition, NotFound, TokaError, Unavailable
from services.common.rpc.status import from_rpc_error
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica
from tokasaurus.scheduler.v1 import observe_pb2

_PATIENCE_S = 5.0  # with a scheduler


async def cancel_request(fleet: Fleet, request_id: str) -> int:
    """How many samples ended. All schedulers are asked, since what is lost with one goes on at another. Raises
    ``NotFound``, or what kept a scheduler from answering."""
    answers = await asyncio.gather(*(_ask(replica, request_id) for replica in fleet.replicas))
    if ended := sum(answer for answer in answers if isinstance(answer, int)):
        return ended
    if all(answer is None for answer in answers):
        raise Unavailable("no scheduler is connected; try again")
    raise next(
        (answer for answer in answers if isinstance(answer, TokaError) and not isinstance(answer, NotFound)),
        NotFound(f"no unfinished request has the id {request_id[:100]!r}", field="id", reason="REQUEST_NOT_FOUND"),
    )


async def _ask(replica: Replica, request_id: str) -> int | TokaError | None:
    """None: it is not connected."""
    if (stub := replica.stub) is None:
        return None
    request, who = observe_pb2.CancelRequestRequest(request_id=request_id), replica.metadata()
    try:
        return (await stub.CancelRequest(request, metadata=who, timeout=_PATIENCE_S)).samples
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return FailedPrecondition(f"scheduler {replica.address} is too old for this (contract before 1.7)")
        return from_rpc_error(error)
    except (grpc.aio.UsageError, asyncio.CancelledError):  # its channel was closed, before or meanwhile
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return Unavailable(f"the connection to scheduler {replica.address} has ended; try again")
