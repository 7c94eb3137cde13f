"""Requests that kill their worker end with an error each, and the deployment goes on."""

import asyncio

import httpx
import psutil
import pytest
from structlog.testing import capture_logs

from bench.server import free_port
from services.common.config import ChosenDeploymentConfig
from services.common.process.handover import listen
from services.common.process.service import Stop
from services.launcher import supervisor
from services.launcher.deployment import ChildSpec, plan_children
from services.launcher.supervisor import supervise

pytestmark = pytest.mark.slow

POISON = 9  # below the tokens that the fake chooses


class FakeWorkerSpec(ChildSpec):
    module = "tests.fakes.worker"


@pytest.mark.timeout(120)
async def test_a_deployment_outlives_requests_that_kill_its_worker_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)  # and so are those after it
    others_children = set(psutil.Process().children())
    port, grpc_port = free_port(), free_port()
    config = ChosenDeploymentConfig(port=port, grpc_port=grpc_port, store_dir=str(tmp_path / "store"))
    worker, *others = plan_children(config, tmp_path)
    flags = (f"listen={worker.address}", f"poison={POISON}")
    worker = FakeWorkerSpec(worker.name, worker.role, worker.address, flags)
    stop, ready = Stop(), asyncio.Event()

    async def announce() -> None:
        ready.set()

    deployment = asyncio.create_task(
        supervise([worker, *others], listen(config.host, port, config.gateways), stop, announce)
    )
    try:
        await ready.wait()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=100) as client:

            async def complete(*prompt: int) -> httpx.Response:
                body = {"model": "tokasaurus-builtin", "prompt": prompt, "max_tokens": 4}
                return await client.post("/v1/completions", json=body)

            with capture_logs() as logs:
                poisoned = await asyncio.gather(complete(POISON, 20), complete(POISON, 21))
                after = await complete(20, 21)  # by a worker that was started after the last death
            assert [(each.status_code, each.json()["error"]["code"]) for each in poisoned] == [(500, "quarantined")] * 2
            deaths = [line["child"] for line in logs if line["event"] == "child exited and is started again"]
            assert set(deaths) == {"worker-0"}
            assert len(deaths) >= 6
            assert after.status_code == 200
        assert not deployment.done()
    finally:
        stop.set()
        await asyncio.gather(deployment, return_exceptions=True)
    assert set(psutil.Process().children()) <= others_children
