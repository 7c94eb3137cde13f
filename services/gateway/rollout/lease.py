"""The right of one gateway at a time to update the weights of all schedulers."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.common.errors import TokaError
from services.gateway.engine.each_scheduler import call_one
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica
from tokasaurus.scheduler.v1 import control_pb2

_SINCE = "1.15"  # version of the contract
_LEASE_S, _RENEW_S = 15.0, 3.0


@asynccontextmanager
async def updating(fleet: Fleet, replicas: Sequence[Replica] | None = None) -> AsyncIterator[None]:
    """Hold the right to update the weights of ``replicas`` (default: all) while the block runs.

    Updates of ``fleet`` run one after the other. Raises ``FailedPrecondition`` during the update of another gateway,
    and the error of a scheduler. A scheduler ends the lease of a gateway that is lost after 15 s.
    """
    holder = uuid.uuid4().hex
    async with fleet.updating:
        # All gateways have the same order, so exactly one of them gets all leases.
        ordered = sorted(fleet.replicas if replicas is None else replicas, key=lambda each: each.scheduler_id)
        held: list[Replica] = []
        try:
            for replica in ordered:
                held.append(replica)  # it may have the lease even if its response is lost
                await _take(replica, holder, _LEASE_S)
            renewing = asyncio.create_task(_renew(held, holder))
            try:
                yield
            finally:
                renewing.cancel()
        finally:
            await asyncio.gather(*(_take_if_connected(each, holder, 0.0) for each in held))


async def _renew(replicas: Sequence[Replica], holder: str) -> None:
    while True:
        await asyncio.sleep(_RENEW_S)
        # At the same time, so that a scheduler without a response does not delay the others until their leases end.
        await asyncio.gather(*(_take_if_connected(each, holder, _LEASE_S) for each in replicas))


async def _take_if_connected(replica: Replica, holder: str, seconds: float) -> None:
    with contextlib.suppress(TokaError):  # it is lost, and the update fails there
        await _take(replica, holder, seconds)


async def _take(replica: Replica, holder: str, seconds: float) -> None:
    request = control_pb2.LeaseUpdatesRequest(holder=holder, duration_ns=round(seconds * 1e9))
    await call_one(replica, lambda stub: stub.LeaseUpdates, request, since=_SINCE)
