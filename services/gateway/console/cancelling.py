"""Cancellation of any client's request from the console."""

from services.common.errors import NotFound, TokaError, Unavailable
from services.gateway.engine.each_scheduler import NOT_CONNECTED, call_each
from services.gateway.engine.fleet import Fleet
from tokasaurus.scheduler.v1 import observe_pb2


async def cancel_request(fleet: Fleet, request_id: str) -> int:
    """Cancel a request here and at all schedulers, since failover may have moved it.

    Return the number of cancelled samples. Raises ``NotFound``, or the error of a scheduler.
    """
    queued = fleet.cancel_queued(request_id)
    request = observe_pb2.CancelRequestRequest(request_id=request_id)
    responses = await call_each(fleet.replicas, lambda stub: stub.CancelRequest, request, since="1.7")
    if cancelled := queued + sum(each.samples for each in responses if not isinstance(each, TokaError)):
        return cancelled
    errors = [each for each in responses if isinstance(each, TokaError)]
    if errors and all(error.reason == NOT_CONNECTED for error in errors):
        raise Unavailable("no scheduler is connected; try again")
    raise next(
        (error for error in errors if not isinstance(error, NotFound) and error.reason != NOT_CONNECTED),
        NotFound(f"no unfinished request has the id {request_id[:100]!r}", field="id", reason="REQUEST_NOT_FOUND"),
    )
