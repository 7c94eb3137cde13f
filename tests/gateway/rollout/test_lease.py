"""Leases of updates: if two gateways update the weights at the same time, one is refused everywhere."""

import asyncio
from types import SimpleNamespace

import pytest

from services.common.errors import FailedPrecondition, InvalidRequest
from services.gateway.rollout import control
from services.gateway.rollout.lease import updating
from services.scheduler.api.lease import UpdateLease
from tests.gateway.deployment import PATIENCE_S
from tests.gateway.rollout.schedulers import Schedulers


async def test_of_two_gateways_that_update_at_once_one_is_refused_everywhere():
    async with Schedulers.running(gateways=2) as schedulers:
        first, second = schedulers.fleets
        for fleet in (first, second):
            reading, read = asyncio.Event(), asyncio.Event()

            async def hold(reading=reading, read=read) -> None:
                reading.set()
                await read.wait()

            for worker in schedulers.workers:
                worker.on_stage = hold
            updating_first = asyncio.create_task(control.update_weights(fleet, "/weights/1", "v1", "keep"))
            await reading.wait()
            other = second if fleet is first else first
            with pytest.raises(FailedPrecondition, match="another gateway updates the weights"):
                await control.update_weights(other, "/weights/2", "v2", "keep")
            read.set()
            assert await updating_first == "v1"
            assert schedulers.versions == ["v1", "v1"]
            await control.update_weights(other, "/weights/3", "v3", "keep")
            assert schedulers.versions == ["v3", "v3"]


async def test_gateways_that_update_at_once_leave_one_version():
    async with Schedulers.running(gateways=2) as schedulers:
        for number in range(1, 6):
            given = [f"v{number}a", f"v{number}b"]
            outcomes = await asyncio.gather(
                *(
                    control.update_weights(fleet, f"/weights/{number + 10 * index}", given[index], "keep")
                    for index, fleet in enumerate(schedulers.fleets)
                ),
                return_exceptions=True,
            )
            succeeded = [each for each in outcomes if isinstance(each, str)]
            assert succeeded
            assert all(isinstance(each, (str, FailedPrecondition)) for each in outcomes)
            assert len(set(schedulers.versions)) == 1
            assert schedulers.versions[0] in succeeded


async def test_a_failed_update_ends_its_leases():
    async with Schedulers.running(gateways=2) as schedulers:
        first, second = schedulers.fleets
        with pytest.raises(InvalidRequest):
            await control.update_weights(first, "/nowhere", None, "keep")
        await control.update_weights(second, "/weights/1", "v1", "keep")
        async with updating(first):
            with pytest.raises(FailedPrecondition, match="another gateway"):
                async with updating(second):
                    pass
        async with updating(second):
            pass


class Replica:
    """A scheduler that holds its second response back if it is ``hung``."""

    def __init__(self, scheduler_id: str, *, hung: bool) -> None:
        self.address = self.scheduler_id = scheduler_id
        self.stub, self._hung = self, hung
        self.calls = 0
        self.renewed = asyncio.Event()

    def metadata(self) -> tuple[()]:
        return ()

    async def LeaseUpdates(self, request, metadata, timeout) -> None:
        self.calls += 1
        if self.calls == 2:
            self.renewed.set()
            if self._hung:
                await asyncio.Event().wait()


async def test_a_scheduler_without_a_response_does_not_delay_the_leases_of_the_others(monkeypatch):
    monkeypatch.setattr("services.gateway.rollout.lease._RENEW_S", 0.0)
    replicas = [Replica("a", hung=True), Replica("b", hung=False)]
    async with asyncio.timeout(PATIENCE_S), updating(SimpleNamespace(updating=asyncio.Lock()), replicas):
        await replicas[1].renewed.wait()


def test_a_lease_ends_by_itself_and_only_for_its_holder():
    now_ns = 0
    lease = UpdateLease(lambda: now_ns)
    lease.take("a", 5 * 10**9)
    with pytest.raises(FailedPrecondition, match="ends after 5 s"):
        lease.take("b", 10**9)
    lease.take("b", 0)  # has no effect
    now_ns = 4 * 10**9
    lease.take("a", 5 * 10**9)
    now_ns = 8 * 10**9
    with pytest.raises(FailedPrecondition):
        lease.take("b", 10**9)
    now_ns = 9 * 10**9
    lease.take("b", 10**9)
    lease.take("b", 0)
    lease.take("a", 10**9)
    for holder, duration_ns, field in (("", 1, "holder"), ("x" * 129, 1, "holder"), ("c", 61 * 10**9, "duration_ns")):
        with pytest.raises(InvalidRequest) as refused:
            lease.take(holder, duration_ns)
        assert refused.value.field == field
