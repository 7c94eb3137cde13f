"""The three images under Docker Compose: built, run, crashed. Run by ``make test-compose``."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.compose

ROOT = Path(__file__).parents[2]
# Builds get the host's network: some engines have no other, and for the rest it makes no difference.
COMPOSE = ["docker", "compose", "-f", "docker-compose.yml", "-f", "docker/compose.build-host-network.yml"]
BASE_URL = f"http://127.0.0.1:{os.environ.get('TOKA_PORT', '10210')}"
SERVICES = {"gateway", "scheduler", "worker"}


def compose(*arguments: str) -> str:
    outcome = subprocess.run([*COMPOSE, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return outcome.stdout


def inspect(service: str) -> dict:
    container = compose("ps", "--all", "--quiet", service).strip()
    output = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True).stdout
    return json.loads(output)[0]


def ask(timeout_s: float = 60.0) -> str:
    body = {"prompt": "Question: What is 2+2?\nAnswer:", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{BASE_URL}/v1/completions", json=body | {"model": "tokasaurus-builtin"}, timeout=timeout_s)
    return answer.raise_for_status().json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def deployment():
    try:
        compose("build")
        compose("up", "--detach", "--wait", "--wait-timeout", "300")
        yield
    except BaseException:
        print(compose("logs", "--tail", "50"))
        raise
    finally:
        compose("down", "--volumes", "--timeout", "20")


def test_a_request_is_answered_also_after_the_worker_crashed(deployment):
    before = ask()
    crashed = inspect("worker")
    os.kill(crashed["State"]["Pid"], signal.SIGKILL)  # `docker kill` would not count as a crash

    deadline = time.monotonic() + 120
    while True:
        try:
            assert ask() == before
            break
        except httpx.HTTPError:
            assert time.monotonic() < deadline, "the deployment did not recover from the crash of its worker"
            time.sleep(0.5)
    assert inspect("worker")["State"]["Pid"] != crashed["State"]["Pid"]
    assert inspect("worker")["RestartCount"] == 1


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_container_is_healthy_and_not_root(deployment, service):
    compose("up", "--detach", "--wait", "--wait-timeout", "300")  # also after a test that crashed something
    state = inspect(service)
    assert state["Config"]["User"] == "toka"
    assert compose("exec", "-T", service, "id", "-u").strip() != "0"
    assert state["State"]["Health"]["Status"] == "healthy"


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_an_image_holds_its_own_service_only(deployment, service):
    found = compose(
        "exec", "-T", service, "python", "-c", "import services, os; print(*os.listdir(services.__path__[0]))"
    )
    assert set(found.split()) & SERVICES == {service}
    torch = compose(
        "exec", "-T", service, "python", "-c", "import importlib.util as u; print(bool(u.find_spec('torch')))"
    )
    assert (torch.strip() == "True") is (service == "worker")
