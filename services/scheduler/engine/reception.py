"""A client's request meets the core; what comes of it is news, and trouble with it goes to the log."""

import logging
import time

import structlog

from services.common.errors import Internal, TokaError, Unavailable
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.news import Accepted, Rejected

_logger = logging.getLogger(__name__)
log = structlog.get_logger(__name__)


def take_in(core: Scheduler, request: Request, *, draining: bool = False) -> Accepted | Rejected:
    """Queue ``request``, if the core takes it. On the step loop's thread."""
    try:
        if draining:
            raise Unavailable("this scheduler is going away and takes nothing new; try another", reason="DRAINING")
        if not core.state.attached:
            raise Unavailable("the worker is not there yet; try again")
        core.submit(request, time.monotonic_ns())
    except TokaError as error:
        return Rejected(request.handle, error)
    except Exception as error:  # one request's trouble is not the others'
        log.error("a request could not be queued", request_id=request.request_id, exc_info=error)
        return Rejected(request.handle, Internal.logged())
    if _logger.isEnabledFor(logging.DEBUG):  # to ask first is much quicker
        log.debug(
            "request accepted",
            request_id=request.request_id,
            samples=request.n,
            prompt_tokens=request.prompt_tokens,
            traceparent=request.traceparent,
        )
    return Accepted(request)


def log_failures(core: Scheduler) -> None:
    """Of requests that were taken in and ended because something went wrong with them. On the step loop's thread."""
    for request_id, error in core.take_failures():
        if isinstance(error, TokaError):
            log.error("a request is ended", request_id=request_id, reason=error.message)
        else:
            log.error("a request failed", request_id=request_id, exc_info=error)
