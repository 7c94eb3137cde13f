"""Gateways that share a store, and are killed in the middle of a batch."""

import random

import pytest

from tests.gateway.batch.requests import begin, ended, line, results
from tests.gateway.deployment import Deployment, Process, eventually, free_port

LINES = 3000
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # leases of the dead take ten seconds each


@pytest.fixture
def two(tmp_path, store_url):
    """A deployment with two gateways, each at its own port."""
    flags = {"store_url": store_url, "store_dir": tmp_path / "store", "batch_concurrency": 100}
    running = Deployment(tmp_path, worker={"step_ms": 1}, gateway=flags).wait_ready()
    port = free_port()
    flags |= {"port": port, "scheduler_addresses": running.scheduler_address}
    other = Process(tmp_path / "other.log", "services.gateway", **flags)
    try:
        yield running, other
    finally:
        other.kill()
        running.stop()


def test_no_line_is_lost_or_told_twice_when_gateways_are_killed(two):
    running, other = two
    with running.sdk() as sdk:
        lines = [line(f"r{n}", prompt=[20 + n % 7] * 20, max_tokens=1 + n % 9) for n in range(LINES)]
        batch = begin(sdk, lines)

        def done(least: int) -> None:
            eventually(lambda: sdk.batches.retrieve(batch.id).request_counts.completed >= least)

        done(200)
        other.kill()
        done(600)
        other.start()
        done(1000)
        running.gateway.kill()
        running.gateway.start()
        running.wait_ready()
        done(1500)
        other.kill()
        finished = ended(sdk, batch)
        assert (finished.status, finished.request_counts.completed) == ("completed", LINES), finished
        told = results(sdk, finished.output_file_id)
    assert [line["custom_id"] for line in told] == [f"r{n}" for n in range(LINES)]
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 1 + n % 9 for n, line in enumerate(told))


def test_ten_kills_of_whatever_it_is(two):
    """Gateways, the scheduler and its worker, at random; each comes back at once."""
    running, other = two
    chance = random.Random(1)
    with running.sdk() as sdk:
        asking = sdk.with_options(max_retries=20)  # the gateway that is asked is among them
        batch = begin(sdk, [line(f"r{n}", prompt=[20 + n % 5] * 9, max_tokens=1 + n % 5) for n in range(LINES)])
        for kill in range(10):
            least = LINES * kill // 12
            eventually(lambda least=least: asking.batches.retrieve(batch.id).request_counts.completed >= least)
            victim = chance.choice((running.gateway, other, running.scheduler, running.worker))
            victim.kill()
            victim.start()
        running.wait_ready()
        finished = ended(asking, batch)
        assert (finished.status, finished.request_counts.completed) == ("completed", LINES), finished
        told = [line["custom_id"] for line in results(sdk, finished.output_file_id)]
    assert told == [f"r{n}" for n in range(LINES)]


def test_both_gateways_work_on_one_batch_and_a_dead_one_is_inherited_from(two):
    """The one that was asked is killed at once, and does not come back."""
    running, other = two
    with running.sdk() as sdk:
        batch = begin(sdk, [line(f"r{n}", max_tokens=20) for n in range(1000)])
        eventually(lambda: sdk.batches.retrieve(batch.id).request_counts.completed >= 100)
    log = running.directory / "other.log"
    eventually(lambda: "store open" in log.read_text())
    running.gateway.kill()
    running.gateway = other
    url = next(part for part in other.command if part.startswith("port=")).removeprefix("port=")
    running.url = f"http://127.0.0.1:{url}"
    with running.sdk() as sdk:
        finished = ended(sdk, batch)
        assert finished.request_counts.completed == 1000
        assert len({line["custom_id"] for line in results(sdk, finished.output_file_id)}) == 1000
