"""Submits clients' requests to the core, and logs failures."""

import logging
import time

import structlog

from services.common.boundaries import errors_as_internal
from services.common.errors import TokaError, Unavailable
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.events import Accepted, Rejected

_logger = logging.getLogger(__name__)
log = structlog.get_logger(__name__)


def submit_request(core: Scheduler, request: Request, *, draining: bool = False) -> Accepted | Rejected:
    """Submit ``request`` to the core. Return the event for its sink. Runs on the step loop's thread."""
    try:
        with errors_as_internal(log, "a request could not be queued", request_id=request.request_id):
            if draining:
                raise Unavailable(
                    "this scheduler is draining and accepts no new requests; send it to another", reason="DRAINING"
                )
            if not core.state.attached:
                raise Unavailable("the worker has not connected yet; try again")
            core.submit(request, time.monotonic_ns())
    except TokaError as error:
        return Rejected(request.handle, error)
    if _logger.isEnabledFor(logging.DEBUG):  # much faster than calling ``log.debug``
        log.debug(
            "request accepted",
            request_id=request.request_id,
            samples=request.n,
            prompt_tokens=request.prompt_tokens,
            traceparent=request.traceparent,
        )
    return Accepted(request)


def log_failures(core: Scheduler) -> None:
    """Log the errors of accepted requests that failed. Runs on the step loop's thread."""
    for request_id, error in core.take_failures():
        if isinstance(error, TokaError):
            log.error("a request was ended", request_id=request_id, reason=error.message)
        else:
            log.error("a request failed", request_id=request_id, exc_info=error)
