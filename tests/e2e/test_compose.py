"""The three images under Docker Compose: built, run, crashed. Run by ``make test-compose``."""

import json
import os
import re
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


def build_arguments() -> list[str]:
    """torch as this host has it, since the build for CUDA takes gigabytes; on an engine that cannot fetch the pinned
    Python, another of its series that is there."""
    dockerfile = (ROOT / "docker" / "gateway.Dockerfile").read_text()
    pinned = re.search(r"(?m)^ARG PYTHON_IMAGE=(\S+)$", dockerfile)[1]
    at_hand = re.sub(r"(:\d+\.\d+)\.\d+(-slim).*", r"\1\2", pinned)
    python = at_hand if has_image(at_hand) and not has_image(pinned) else pinned
    torch = re.search(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    return ["--build-arg", f"PYTHON_IMAGE={python}", "--build-arg", f"TORCH={torch}"]


def has_image(name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode == 0


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
        compose("build", *build_arguments())
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


# What it did with each place: a line for those that it could write to.
WRITES = """
import pathlib, sysconfig
image = "/", pathlib.Path.home(), sysconfig.get_path("purelib")
for place in *image, "/models", "/tmp", "/cache", "/recordings", "/store":
    try:
        (pathlib.Path(place) / "written").write_text("")
        print(place)
    except OSError:
        pass
"""
KERNEL = "import re; print(*re.findall(r'(?:NoNewPrivs|Cap...):\\s*(\\w+)', open('/proc/self/status').read()))"


@pytest.mark.parametrize(
    ("service", "volume"), [("gateway", "/store"), ("scheduler", "/recordings"), ("worker", "/cache")]
)
def test_a_container_writes_to_memory_and_to_its_volume_only(deployment, service, volume):
    assert compose("exec", "-T", service, "python", "-c", WRITES).split() == ["/tmp", volume]
    as_root = ["exec", "-T", "--user", "root", service, "python", "-c", WRITES]
    assert set(compose(*as_root).split()) <= {"/tmp", volume}  # root is held by the same file system


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_process_has_no_privileges_and_cannot_gain_any(deployment, service):
    *capabilities, no_new_privileges = compose("exec", "-T", service, "python", "-c", KERNEL).split()
    assert len(capabilities) == 5
    assert {int(each, 16) for each in capabilities} == {0}
    assert no_new_privileges == "1"


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
