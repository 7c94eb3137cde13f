"""Pauses, aborts and cache resets at all schedulers."""

from collections.abc import Sequence
from typing import Literal

from services.gateway.engine.each_scheduler import call_all
from services.gateway.engine.fleet import Fleet
from tokasaurus.scheduler.v1 import control_pb2, observe_pb2

PauseMode = Literal["keep", "wait", "abort"]

_MODES: dict[PauseMode, control_pb2.PauseMode] = {
    "keep": control_pb2.PAUSE_MODE_KEEP,
    "wait": control_pb2.PAUSE_MODE_WAIT,
    "abort": control_pb2.PAUSE_MODE_ABORT,
}
_SINCE = "1.12"  # version of the contract


async def pause(fleet: Fleet, mode: PauseMode, *, recompute: bool = False) -> int:
    """Pause all schedulers. Return the number of samples that ``abort`` ended, once no worker computes.

    Raises the error of a scheduler. The others are paused then: resume, or pause again.
    """
    request = control_pb2.PauseRequest(mode=_MODES[mode], recompute=recompute)
    responses = await call_all(fleet, lambda stub: stub.Pause, request, since=_SINCE, timeout_s=None)
    return sum(each.aborted_samples for each in responses)


async def resume(fleet: Fleet) -> None:
    """Resume all schedulers. Raises the error of a scheduler."""
    await call_all(fleet, lambda stub: stub.Resume, control_pb2.ResumeRequest(), since=_SINCE)


async def is_paused(fleet: Fleet) -> bool:
    """Return whether every scheduler is paused. Raises the error of a scheduler."""
    responses = await call_all(fleet, lambda stub: stub.GetLoad, observe_pb2.GetLoadRequest(), since=_SINCE)
    return all(each.load.paused for each in responses)


async def abort(fleet: Fleet, request_ids: Sequence[str]) -> int:
    """End requests with the tokens that they have, or all requests if there are no ids.

    Return the number of their samples. Raises the error of a scheduler.
    """
    request = control_pb2.AbortRequestsRequest(request_ids=request_ids)
    responses = await call_all(fleet, lambda stub: stub.AbortRequests, request, since=_SINCE)
    return sum(each.samples for each in responses)


async def reset_prefix_cache(fleet: Fleet) -> int:
    """Empty the prefix caches. Return the number of pages that are free now. Raises the error of a scheduler."""
    request = control_pb2.ResetPrefixCacheRequest()
    responses = await call_all(fleet, lambda stub: stub.ResetPrefixCache, request, since=_SINCE)
    return sum(each.freed_pages for each in responses)
