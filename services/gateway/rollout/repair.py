"""Makes the weights of all schedulers equal after an update that was interrupted.

A gateway, a scheduler or a worker may be lost when some schedulers have committed an update and others have not. Every
gateway compares the weights that its schedulers report. If they stay different, one gateway completes the update.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from services.common.boundaries import errors_to
from services.common.errors import FailedPrecondition
from services.gateway.engine.each_scheduler import call_one
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica
from services.gateway.rollout.lease import updating
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import control_pb2

log = structlog.get_logger(__name__)

_SINCE = "1.15"  # version of the contract
_POLL_S = 0.5
_DELAY_S = 5.0  # trainers over gRPC commit at one scheduler after the other
_LONGEST_DELAY_S = 60.0  # after attempts that failed


class _Content(NamedTuple):
    """The content of weights. Schedulers with equal contents have the same weights."""

    version: str
    fingerprint: int

    @classmethod
    def of(cls, weights: weights_pb2.Weights) -> "_Content":
        return cls(weights.version, weights.fingerprint)


class WeightsRepair:
    """Watches the weights of the schedulers of one gateway. ``run`` is a task that runs as long as the gateway."""

    def __init__(self, fleet: Fleet, delay_s: float = _DELAY_S) -> None:
        """``delay_s`` is the time in seconds for which weights must differ before a repair."""
        self._fleet = fleet
        self._delay_s = delay_s

    async def run(self) -> None:
        """Repair the weights whenever they stay different, until the task is cancelled."""
        since, delay_s = 0.0, self._delay_s
        while True:
            await asyncio.sleep(min(_POLL_S, self._delay_s))
            if not (different := find_different(self._fleet.replicas)):
                since, delay_s = 0.0, self._delay_s
                continue
            since = since or time.monotonic()
            if time.monotonic() - since < delay_s:
                continue
            errors: list[Exception] = []
            for replicas in different:
                with errors_to(errors.append):
                    await repair(self._fleet, replicas)
            for error in errors:
                log.warning("schedulers have different weights", reason=str(error))
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            since = 0.0


def find_different(replicas: Sequence[Replica]) -> list[list[Replica]]:
    """Return the connected replicas of each model whose replicas report different weights."""
    by_model: dict[str, list[Replica]] = defaultdict(list)
    for replica in replicas:
        if replica.model is not None and replica.load is not None and replica.load.HasField("weights"):
            by_model[replica.model.id].append(replica)
    return [group for group in by_model.values() if len({_reported(each) for each in group}) > 1]


def _reported(replica: Replica) -> _Content | None:
    return None if replica.load is None else _Content.of(replica.load.weights)


async def repair(fleet: Fleet, replicas: Sequence[Replica]) -> None:
    """Give all ``replicas``, which are connected, the weights that were committed last at any of them.

    Raises ``FailedPrecondition`` during an update, and the error of a scheduler that cannot read these weights.
    """
    async with updating(fleet, replicas):
        request = control_pb2.GetWeightsRequest()
        found = {each: await call_one(each, lambda stub: stub.GetWeights, request, since=_SINCE) for each in replicas}
        newest = max((each.weights for each in found.values()), key=lambda weights: weights.committed_unix_ns)
        for replica, response in found.items():
            if _Content.of(response.weights) != _Content.of(newest):
                await _complete(replica, response.staged, newest)


async def _complete(replica: Replica, staged: control_pb2.StagedWeights, newest: weights_pb2.Weights) -> None:
    """Give one scheduler the weights ``newest``. ``staged`` is the update that it has staged, if any."""
    update_id = staged.update_id
    if _Content(staged.version, staged.fingerprint) != _Content.of(newest):
        update_id = await _stage(replica, newest)
    request = control_pb2.CommitWeightsRequest(update_id=update_id, mode=control_pb2.PAUSE_MODE_KEEP)
    await call_one(replica, lambda stub: stub.CommitWeights, request, since=_SINCE, timeout_s=None)
    log.info("weights repaired", scheduler=replica.address, version=newest.version)


async def _stage(replica: Replica, newest: weights_pb2.Weights) -> str:
    """Stage the files of ``newest``, and return the id of the update.

    Raises ``FailedPrecondition`` if the files have changed, and the error of the scheduler.
    """
    request = control_pb2.StageWeightsRequest(directory=newest.directory, version=newest.version)
    staged = await call_one(replica, lambda stub: stub.StageWeights, request, since=_SINCE, timeout_s=None)
    if staged.fingerprint == newest.fingerprint:
        return staged.update_id
    discarding = control_pb2.DiscardWeightsRequest(update_id=staged.update_id)
    await call_one(replica, lambda stub: stub.DiscardWeights, discarding, since=_SINCE)
    raise FailedPrecondition(
        f"scheduler {replica.address} does not have the weights {newest.version!r} of the others, and the files in"
        f" {newest.directory} have changed; repeat the update"
    )
