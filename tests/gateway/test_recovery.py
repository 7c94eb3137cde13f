"""Schedulers come late, die, hang and come back; the gateway says so and goes on."""

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from services.common.config import SchedulerConfig
from services.common.errors import Unavailable
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.session import Timings
from services.scheduler.server import SchedulerServer
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import Deployment, Process, eventually, eventually_async, free_port, stop_and_wait


@pytest.fixture
def fragile(tmp_path):
    """A deployment to break, with slow steps so that it can be broken in the middle of an answer."""
    running = Deployment(tmp_path, worker={"step_ms": 5}).wait_ready()
    yield running
    running.stop()


@pytest.mark.slow
def test_a_gateway_without_a_scheduler_says_so_and_waits_for_it(tmp_path):
    port, scheduler = free_port(), free_port()
    gateway = Process(
        tmp_path / "gateway.log", "services.gateway", port=port, scheduler_addresses=f"127.0.0.1:{scheduler}"
    )
    url = f"http://127.0.0.1:{port}"

    def healthy():
        try:
            return httpx.get(url + "/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(healthy)
        ready = httpx.get(url + "/ready")
        assert ready.status_code == 503
        assert f"127.0.0.1:{scheduler}" in ready.json()["reason"]
        with ThreadPoolExecutor() as threads:  # each waits a while for a scheduler
            asked = threads.submit(httpx.post, url + "/v1/completions", json={"prompt": "x"}, timeout=60)
            models = httpx.get(url + "/v1/models", timeout=60)
            refused = asked.result()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert (models.status_code, models.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert stop_and_wait(gateway) == 0
    finally:
        gateway.kill()


@pytest.mark.slow
def test_without_failover_a_killed_scheduler_ends_requests_with_an_error_and_a_new_one_serves(tmp_path):
    running = Deployment(tmp_path, worker={"step_ms": 5}, gateway={"failover_seconds": 0}).wait_ready()
    try:
        with running.sdk() as sdk, ThreadPoolExecutor() as threads:
            model = sdk.models.list().data[0].id
            whole = threads.submit(sdk.completions.create, model=model, prompt="x", max_tokens=2000)
            stream = sdk.completions.create(model=model, prompt="x", max_tokens=2000, stream=True)
            next(iter(stream))
            eventually(lambda: running.metric("toka_num_requests_running") == 2)
            running.scheduler.kill()
            with pytest.raises(openai.APIError, match="scheduler was lost"):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="scheduler was lost") as caught:
                whole.result()
            assert caught.value.status_code == 503
            eventually(lambda: running.status("/ready") == 503)
            assert running.status("/health") == 200
            with pytest.raises(openai.APIStatusError) as caught:
                sdk.completions.create(model=model, prompt="x")
            assert caught.value.status_code == 503
            assert "retry-after" in caught.value.response.headers
            running.scheduler.start()
            running.wait_ready()
            assert sdk.completions.create(model=model, prompt="x", max_tokens=3).usage.completion_tokens == 3
    finally:
        running.stop()


@pytest.mark.slow
def test_a_new_request_waits_a_moment_for_a_scheduler_that_is_coming(fragile):
    assert fragile.complete(prompt="x", max_tokens=2).status_code == 200
    fragile.scheduler.kill()
    eventually(lambda: fragile.status("/ready") == 503)
    fragile.scheduler.start()
    statuses: list[int] = []

    def served():
        statuses.append(fragile.complete(prompt="x", max_tokens=2).status_code)
        return statuses[-1] == 200

    eventually(served)
    assert set(statuses) <= {200, 503}


@pytest.mark.slow
async def test_a_hung_scheduler_is_found_by_its_heartbeat(fragile, tokenizer):
    timings = Timings(heartbeat_interval=0.1, heartbeat_timeout=1.0, wait_for_ready=0.1, failover=0)
    fleet = Fleet(
        [fragile.scheduler_address],
        tokenizer_fingerprint=tokenizer.fingerprint,
        metrics=RequestMetrics(),
        timings=timings,
    )
    fleet.start()
    try:
        await eventually_async(lambda: fleet.trouble == "")
        fragile.scheduler.signal(signal.SIGSTOP)
        await eventually_async(lambda: fleet.trouble != "")
        with pytest.raises(Unavailable, match="no scheduler is ready"):
            await fleet.model(None)
        fragile.scheduler.signal(signal.SIGCONT)
        await eventually_async(lambda: fleet.trouble == "")
    finally:
        fragile.scheduler.signal(signal.SIGCONT)
        await fleet.stop()


async def test_a_scheduler_whose_worker_loads_gets_its_session_the_moment_it_is_ready(tokenizer):
    """With pauses of an hour between tries only the scheduler's health can say so."""
    worker = FakeWorker()
    address = await worker.start(loading=True)
    scheduler = SchedulerServer(SchedulerConfig(worker_addresses=(address,), scheduler_listen="127.0.0.1:0"))
    fleet = Fleet(
        [await scheduler.start()],
        tokenizer_fingerprint=tokenizer.fingerprint,
        metrics=RequestMetrics(),
        timings=Timings(first_backoff=3600.0, last_backoff=3600.0),
    )
    with capture_logs() as lines:
        fleet.start()
        try:
            await eventually_async(lambda: "the worker has not connected yet" in fleet.trouble)
            await worker.load()
            await eventually_async(lambda: fleet.trouble == "")
        finally:
            await fleet.stop()
            await scheduler.stop()
            await worker.stop()
    assert [line for line in lines if line["log_level"] != "info"] == []


async def test_a_scheduler_with_another_tokenizer_is_refused_with_the_reason(deployment):
    fleet = Fleet(
        [deployment.scheduler_address], tokenizer_fingerprint="0" * 64, metrics=RequestMetrics(), timings=Timings()
    )
    fleet.start()
    try:
        await eventually_async(lambda: "tokenizer" in fleet.trouble)
        assert fleet.models == {}
    finally:
        await fleet.stop()


async def test_a_sample_that_fails_in_the_worker_is_an_error_for_its_client_only(tmp_path):
    worker = FakeWorker()
    worker.fail_tokens = {33: "this prompt is cursed"}
    running = Deployment(tmp_path, worker_address=await worker.start())
    try:
        await asyncio.to_thread(running.wait_ready)
        async with running.async_sdk() as sdk:
            model = (await sdk.models.list()).data[0].id
            good = asyncio.create_task(sdk.completions.create(model=model, prompt=[34], max_tokens=50))
            with pytest.raises(openai.APIStatusError) as caught:
                await sdk.completions.create(model=model, prompt=[[35], [33]], max_tokens=50)
            assert caught.value.status_code == 500
            stream = await sdk.completions.create(model=model, prompt=[33], max_tokens=50, stream=True)
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
            assert (await good).usage.completion_tokens == 50
    finally:
        await asyncio.to_thread(running.stop)
        await worker.stop()
    assert worker.violations == []


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_back(tmp_path):
    running = Deployment(
        tmp_path, worker={"step_ms": 5, "max_slots": 1}, scheduler={"max_queued_sequences": 4}
    ).wait_ready()
    try:
        with ThreadPoolExecutor() as threads:
            first = threads.submit(running.complete, prompt="x", n=4, max_tokens=200)
            eventually(lambda: running.metric("toka_num_requests_waiting") == 3)
            for stream in (False, True):
                refused = running.complete(prompt="x", n=2, stream=stream)
                assert refused.status_code == 429, refused.text
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
            assert first.result().status_code == 200
        never = running.complete(prompt="x", n=5)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert running.complete(prompt="x", max_tokens=2).status_code == 200
    finally:
        running.stop()


@pytest.mark.slow
def test_of_two_replicas_one_may_die(tmp_path, deployment):
    running = Deployment(tmp_path, other_schedulers=(deployment.scheduler_address,))
    try:
        eventually(lambda: running.status("/metrics") == 200 and running.metric("toka_replica_ready") == 2)
        prompts = [[20 + i] * 70 for i in range(20)]
        assert running.complete(prompt=prompts, max_tokens=5, seed=1).status_code == 200
        running.scheduler.kill()
        eventually(lambda: running.metric("toka_replica_ready") == 1)
        assert running.status("/ready") == 200
        for _ in range(3):
            assert running.complete(prompt=prompts, max_tokens=5, seed=1).status_code == 200
    finally:
        running.stop()


@pytest.mark.slow
def test_the_first_answer_of_a_gateway_knows_the_models(fragile):
    fragile.gateway.stop()
    fragile.gateway.start()
    answers = []

    def answered() -> bool:
        try:
            answers.append(httpx.get(fragile.url + "/v1/models", timeout=60))
        except httpx.ConnectError:
            return False
        return True

    eventually(answered)
    assert [model["id"] for model in answers[0].json()["data"]] == ["tokasaurus-builtin"]
