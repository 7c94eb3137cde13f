"""Processes that are lost at each stage of an update: afterwards all schedulers have the same weights.

The test makes the calls of a gateway until the stage, and makes none afterwards. Another gateway is left.
"""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from itertools import product
from types import SimpleNamespace

import grpc
import pytest

from services.common.errors import FailedPrecondition, Unavailable
from services.gateway.engine.fleet import Fleet
from services.gateway.rollout import control
from services.gateway.rollout.repair import WeightsRepair, find_different, repair
from tests.gateway.deployment import PATIENCE_S, eventually_async
from tests.gateway.rollout.schedulers import Schedulers, cancelled
from tests.quick import quick_if
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import control_pb2 as c
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc, sleep_pb2

STAGES = {"staged at some": (1, 0), "staged at all": (2, 0), "committed at some": (2, 1), "committed at all": (2, 2)}
LOST = [
    "gateway", "first scheduler", "last scheduler", "first worker", "last worker", "last scheduler and worker",
    "first scheduler and worker",
]  # fmt: skip

# Each stage twice, each loss once, and the loss that makes all processes forget the new weights.
QUICK = {
    ("staged at some", "gateway"),
    ("staged at some", "last scheduler"),
    ("staged at all", "first scheduler"),
    ("staged at all", "last worker"),
    ("committed at some", "last scheduler and worker"),
    ("committed at some", "first scheduler and worker"),
    ("committed at all", "gateway"),
    ("committed at all", "first worker"),
}


def is_quick(stage_name: str, lost: str) -> bool:
    """Return whether ``make test`` runs this case."""
    return (stage_name, lost) in QUICK


@asynccontextmanager
async def stub_of(address: str):
    async with grpc.aio.insecure_channel(address) as channel:
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel)


async def stage(address: str, number: int) -> str:
    async with stub_of(address) as stub:
        staging = c.StageWeightsRequest(directory=f"/weights/{number}", version=f"v{number}")
        return (await stub.StageWeights(staging)).update_id


async def upload(address: str, number: int) -> str:
    described = weights_pb2.UploadedTensor(name="norm", dtype="F32", shape=[1])
    chunk = weights_pb2.TensorChunk(name="norm", data=bytes([number, 0, 0, 0]))
    messages = [
        c.UploadWeightsRequest(header=c.UploadHeader(version=f"v{number}", tensors=[described])),
        c.UploadWeightsRequest(chunk=chunk),
    ]
    async with stub_of(address) as stub:
        return (await stub.UploadWeights(iter(messages))).update_id


async def update_until(addresses: Sequence[str], staged: int, committed: int, source=stage) -> None:
    """Make the calls of an update to v2, at the first ``staged`` and ``committed`` schedulers."""
    ids = [await source(address, 2) for address in addresses[:staged]]
    if staged == len(addresses):
        for address in addresses:
            async with stub_of(address) as stub:
                await stub.Pause(c.PauseRequest(mode=c.PAUSE_MODE_KEEP, limit_ns=10**8))
    for address, update_id in list(zip(addresses, ids, strict=False))[:committed]:
        async with stub_of(address) as stub:
            await stub.CommitWeights(c.CommitWeightsRequest(update_id=update_id))


async def lose(schedulers: Schedulers, lost: str) -> None:
    """End processes, and start them again."""
    index = 0 if "first" in lost else 1
    if "scheduler" in lost:
        await schedulers.stop(index)
    if "worker" in lost:
        schedulers.workers[index].crash()
    if "scheduler" in lost:
        await schedulers.start(index)


async def settled(schedulers: Schedulers, expected: str) -> None:
    """Wait until all workers have the version ``expected``, and check that all schedulers know it and compute."""
    [fleet] = schedulers.fleets
    repairing = asyncio.create_task(WeightsRepair(fleet, delay_s=0.05).run())
    try:
        await eventually_async(lambda: set(schedulers.versions) == {expected})
        await schedulers.until_ready(fleet)
        assert await known_versions(fleet) == {expected}
        await unpaused(fleet)
    finally:
        await cancelled(repairing)


async def known_versions(fleet: Fleet) -> set[str]:
    """Return the versions that the schedulers know. The gateway may learn that a worker is lost only by asking."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(Unavailable):
                return {each["version"] for each in await control.read_weights(fleet, checksums=False)}


async def unpaused(fleet: Fleet) -> None:
    """Wait until the limit of the update's pauses ends them."""
    async with asyncio.timeout(PATIENCE_S):
        while await control.is_paused(fleet):
            pass


@pytest.mark.parametrize(("stage_name", "lost"), quick_if(is_quick, product(STAGES, LOST)))
async def test_after_a_loss_at_any_stage_all_schedulers_have_one_version(stage_name, lost):
    staged, committed = STAGES[stage_name]
    async with Schedulers.running() as schedulers:
        await control.update_weights(schedulers.fleets[0], "/weights/1", "v1", "keep")
        await update_until(schedulers.addresses, staged, committed)
        await lose(schedulers, lost)
        forgotten = committed == 1 and lost == "first scheduler and worker"  # no process knows the new weights
        await settled(schedulers, "v2" if committed and not forgotten else "v1")


@pytest.mark.parametrize("lost", ["gateway", "last worker"])
async def test_uploads_are_completed_from_what_is_staged_or_from_the_file_of_another_worker(lost):
    async with Schedulers.running() as schedulers:
        await control.update_weights(schedulers.fleets[0], "/weights/1", "v1", "keep")
        await update_until(schedulers.addresses, 2, 1, upload)
        first, last = schedulers.workers
        last.disk[first.weights.directory] = 2 if lost == "last worker" else None
        await lose(schedulers, lost)
        await settled(schedulers, "v2")


async def test_schedulers_are_left_as_they_are_if_the_files_have_changed():
    async with Schedulers.running() as schedulers:
        await update_until(schedulers.addresses, 2, 1)
        [fleet], last = schedulers.fleets, schedulers.workers[1]
        last.disk["/weights/2"] = 3
        await stage(schedulers.addresses[1], 4)  # it replaces the update
        with pytest.raises(FailedPrecondition, match="have changed"):
            await repair(fleet, fleet.replicas)
        assert schedulers.versions == ["v2", ""]
        assert last.staged is None


async def test_an_update_changes_nothing_if_the_weights_of_one_scheduler_are_asleep():
    async with Schedulers.running() as schedulers:
        async with stub_of(schedulers.addresses[0]) as stub:
            await stub.Sleep(sleep_pb2.SleepRequest(mode=c.PAUSE_MODE_KEEP))
        with pytest.raises(FailedPrecondition, match="asleep"):
            await control.update_weights(schedulers.fleets[0], "/weights/1", "v1", "keep")
        assert schedulers.versions == ["", ""]


def replica(model: str, version: str | None, fingerprint: int = 0) -> SimpleNamespace:
    weights = None if version is None else weights_pb2.Weights(version=version, fingerprint=fingerprint)
    return SimpleNamespace(model=SimpleNamespace(id=model), load=observe_pb2.Load(weights=weights))


def test_only_replicas_of_the_same_model_are_compared():
    same = [replica("a", "v1", 1), replica("b", "v2", 2), replica("a", "v1", 1), replica("a", None)]
    assert find_different([*same, SimpleNamespace(model=None, load=None)]) == []
    other = replica("b", "v2", 3)
    assert find_different([*same, other]) == [[same[1], other]]
