"""Pauses, aborts, cache resets and new weights at all schedulers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from services.common.boundaries import undo_on_error_async
from services.common.errors import TokaError
from services.gateway.engine.each_scheduler import call_all, call_each, stream_to_each
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica
from services.gateway.rollout.lease import updating
from tokasaurus.scheduler.v1 import control_pb2, observe_pb2

PauseMode = Literal["keep", "wait", "abort"]

MODES: dict[PauseMode, control_pb2.PauseMode] = {
    "keep": control_pb2.PAUSE_MODE_KEEP,
    "wait": control_pb2.PAUSE_MODE_WAIT,
    "abort": control_pb2.PAUSE_MODE_ABORT,
}
_SINCE, _UPLOADS_SINCE = "1.12", "1.13"  # versions of the contract
_MOST_PAUSE_NS = 30 * 10**9  # limit of the pause of an update, in case this gateway is lost during the update


async def pause(fleet: Fleet, mode: PauseMode, *, recompute: bool = False) -> int:
    """Pause all schedulers. Return the number of samples that ``abort`` ended, once no worker computes.

    Raises the error of a scheduler. The others are paused then: resume, or pause again.
    """
    with aborting(fleet, mode) as queued:
        return queued + sum(each.aborted_samples for each in await _pause(fleet.replicas, mode, recompute=recompute))


async def resume(fleet: Fleet) -> None:
    """Resume all schedulers. Raises the error of a scheduler."""
    await call_all(fleet.replicas, lambda stub: stub.Resume, control_pb2.ResumeRequest(), since=_SINCE)


async def is_paused(fleet: Fleet) -> bool:
    """Return whether every scheduler is paused. Raises the error of a scheduler."""
    return all(await _are_paused(fleet))


async def _are_paused(fleet: Fleet) -> list[bool]:
    """Return whether each scheduler is paused. Raises the error of a scheduler."""
    responses = await call_all(fleet.replicas, lambda stub: stub.GetLoad, observe_pb2.GetLoadRequest(), since=_SINCE)
    return [each.load.paused for each in responses]


async def abort(fleet: Fleet, request_ids: Sequence[str]) -> int:
    """End requests with the tokens that they have, or all requests if there are no ids.

    Return the number of their samples. Raises the error of a scheduler.
    """
    request = control_pb2.AbortRequestsRequest(request_ids=request_ids)
    with fleet.aborting(frozenset(request_ids) or None) as queued:
        responses = await call_all(fleet.replicas, lambda stub: stub.AbortRequests, request, since=_SINCE)
    return queued + sum(each.samples for each in responses)


def aborting(fleet: Fleet, mode: PauseMode) -> AbstractContextManager[int]:
    """Return a context for calls that pause the schedulers in ``mode``. With ``abort``, it is ``Fleet.aborting``."""
    return fleet.aborting(None) if mode == "abort" else nullcontext(0)


async def reset_prefix_cache(fleet: Fleet) -> int:
    """Empty the prefix caches. Return the number of pages that are free now. Raises the error of a scheduler."""
    request = control_pb2.ResetPrefixCacheRequest()
    responses = await call_all(fleet.replicas, lambda stub: stub.ResetPrefixCache, request, since=_SINCE)
    return sum(each.freed_pages for each in responses)


async def update_weights(fleet: Fleet, directory: str, version: str | None, mode: PauseMode) -> str:
    """Replace the weights of all schedulers' workers by those in ``directory``. Return their version.

    All schedulers that are not paused already are paused at the same time for this. Raises the error of a
    scheduler. If one cannot stage the weights, nothing has changed. Updates of ``fleet`` run one after the other.
    """
    staging = control_pb2.StageWeightsRequest(directory=directory, version=version)
    async with updating(fleet):
        staged = await call_each(fleet.replicas, lambda stub: stub.StageWeights, staging, since=_SINCE, timeout_s=None)
        return await commit_staged(fleet, staged, mode)


async def upload_weights(
    fleet: Fleet, messages: AsyncIterator[control_pb2.UploadWeightsRequest], mode: PauseMode
) -> str:
    """Replace the weights of all schedulers' workers by the upload ``messages``. Return their version.

    It pauses, commits and raises in the same way as ``update_weights``.
    """
    async with updating(fleet):
        staged = await stream_to_each(fleet.replicas, lambda stub: stub.UploadWeights, messages, since=_UPLOADS_SINCE)
        return await commit_staged(fleet, staged, mode)


async def read_weights(fleet: Fleet, *, checksums: bool) -> list[dict[str, Any]]:
    """Return the weights of each scheduler's workers. Raises the error of a scheduler."""
    request = control_pb2.GetWeightsRequest(checksums=checksums)
    responses = await call_all(fleet.replicas, lambda stub: stub.GetWeights, request, since=_SINCE, timeout_s=None)
    found = []
    for replica, response in zip(fleet.replicas, responses, strict=True):
        weights = response.weights
        facts: dict[str, Any] = {"scheduler": replica.address, "version": weights.version}
        facts |= {"directory": weights.directory, "committed_unix_ns": weights.committed_unix_ns}
        if checksums:
            facts["workers"] = [
                {"address": rank.address, "checksums": {each.name: each.blake2b for each in rank.tensors}}
                for rank in response.ranks
            ]
        found.append(facts)
    return found


async def _pause(replicas: Sequence[Replica], mode: PauseMode, **fields: Any) -> list[control_pb2.PauseResponse]:
    """Pause ``replicas``. ``fields`` are the other fields of ``PauseRequest``."""
    request = control_pb2.PauseRequest(mode=MODES[mode], **fields)
    return await call_all(replicas, lambda stub: stub.Pause, request, since=_SINCE, timeout_s=None)


async def commit_staged(
    fleet: Fleet, staged: Sequence[control_pb2.StageWeightsResponse | TokaError], mode: PauseMode
) -> str:
    """Commit the update if every scheduler has staged it. Otherwise discard it, and raise the first error."""
    errors = [each for each in staged if isinstance(each, TokaError)]
    ids = [each.update_id for each in staged if not isinstance(each, TokaError)]
    if errors:
        await _discard(fleet, ids)
        raise errors[0]
    committing = asyncio.create_task(_commit(fleet, ids, mode))
    try:
        return await asyncio.shield(committing)
    except asyncio.CancelledError:  # the client has disconnected; the commits must not stop half-way
        await asyncio.wait([committing])
        raise


async def _commit(fleet: Fleet, ids: Sequence[str], mode: PauseMode) -> str:
    """Commit an update at each scheduler, ``ids`` in their order, while all are paused. Return its version."""
    async with undo_on_error_async(_discard, fleet, ids):
        were_paused = dict(zip(fleet.replicas, await _are_paused(fleet), strict=True))
        running = [replica for replica, was_paused in were_paused.items() if not was_paused]
        if mode == "abort":
            request = control_pb2.AbortRequestsRequest()
            paused = [replica for replica, was_paused in were_paused.items() if was_paused]
            with fleet.aborting(None):
                await call_all(paused, lambda stub: stub.AbortRequests, request, since=_SINCE)
        resuming = [control_pb2.ResumeRequest()] * len(running)
        try:
            pauses = await _pause(running, mode, limit_ns=_MOST_PAUSE_NS)
            # Only the pauses of this update end with it.
            resuming = [control_pb2.ResumeRequest(pause=each.pause) for each in pauses]
            committing = [control_pb2.CommitWeightsRequest(update_id=each) for each in ids]
            committed = await call_all(
                fleet.replicas, lambda stub: stub.CommitWeights, committing, since=_SINCE, timeout_s=None
            )
        finally:
            await call_all(running, lambda stub: stub.Resume, resuming, since=_SINCE)
    version: str = committed[0].weights.version
    return version


async def _discard(fleet: Fleet, ids: Sequence[str]) -> None:
    for each in ids:
        request = control_pb2.DiscardWeightsRequest(update_id=each)
        await call_each(fleet.replicas, lambda stub: stub.DiscardWeights, request, since=_SINCE)
