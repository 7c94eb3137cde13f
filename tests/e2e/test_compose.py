"""The images under Docker Compose: built, run, crashed, scaled, taken down. Run by ``make test-compose``."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from services.common.flags import build
from services.launcher.compose import ComposeConfig, overlay

pytestmark = pytest.mark.compose

ROOT = Path(__file__).parents[2]
# Builds get the host's network: some engines have no other, and for the rest it makes no difference.
COMPOSE = ["docker", "compose", "-f", "docker-compose.yml", "-f", "docker/compose.build-host-network.yml"]
PORT = int(os.environ.get("TOKA_PORT", "10210"))
BASE_URL = f"http://127.0.0.1:{PORT}"
SERVICES = {"gateway", "scheduler", "worker"}
PATIENCE_S = 240.0
UP = ("up", "--detach", "--wait", "--wait-timeout", "600")


def compose(*arguments: str, **variables: str) -> str:
    """Flags of the tests' own environment are none of the containers'."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TOKA_") or name == "TOKA_PORT"}
    return subprocess.run(
        [*COMPOSE, *arguments], cwd=ROOT, env=mine | variables, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


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


def inspect(service: str, index: int = 1) -> dict[str, Any]:
    container = compose("ps", "--all", "--quiet", service).split()[index - 1]
    return json.loads(docker("inspect", container))[0]


def ask(url: str = BASE_URL) -> str:
    body = {"prompt": "Question: What is 2+2?\nAnswer:", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"model": "tokasaurus-builtin"}, timeout=60)
    return answer.raise_for_status().json()["choices"][0]["text"]


def eventually(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < give_up_at, what
        time.sleep(0.5)


def left_behind() -> list[str]:
    """Containers, networks and volumes of the project."""
    own = ("--quiet", "--filter", "label=com.docker.compose.project=tokasaurus")
    kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
    return [name for kind in kinds for name in docker(*kind, *own).split()]


@contextmanager
def running(*options: str, scale: tuple[str, ...] = (), **variables: str) -> Iterator[None]:
    """The project with these files and profiles, nothing of it before, and nothing afterwards."""
    compose("down", "--volumes", "--timeout", "20")  # the module's own, which is not needed any more
    try:
        compose(*options, *UP, *scale, **variables)
        yield
    except BaseException:
        print(compose(*options, "logs", "--tail", "50", **variables))
        raise
    finally:
        compose(*options, "down", "--volumes", "--timeout", "20", **variables)
    assert left_behind() == []


@pytest.fixture(scope="module")
def images() -> None:
    compose("build", *build_arguments())


@pytest.fixture(scope="module")
def deployment(images) -> Iterator[None]:
    with running():
        yield


def test_a_chat_is_answered_and_streamed(deployment):
    client = OpenAI(base_url=f"{BASE_URL}/v1", api_key="none")
    asked = {"model": "tokasaurus-builtin", "temperature": 0, "max_tokens": 20}
    asked["messages"] = [{"role": "user", "content": "What is 2+2?"}]
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole
    assert "".join(pieces) == whole


@pytest.mark.parametrize("service", ["worker", "scheduler", "gateway"])
def test_a_request_is_answered_also_after_a_service_crashed(deployment, service: str):
    before, crashed = ask(), inspect(service)
    os.kill(crashed["State"]["Pid"], signal.SIGKILL)  # `docker kill` would not count as a crash
    eventually(lambda: inspect(service)["RestartCount"] == crashed["RestartCount"] + 1, f"{service} was not restarted")
    eventually(lambda: ask() == before, f"the deployment did not recover from the crash of its {service}")


def test_prometheus_would_find_every_service(deployment):
    page = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())"
    for url, metric in (
        ("http://gateway:10210/metrics", "vllm:time_to_first_token_seconds_count{"),
        ("http://toka-schedulers:9400/metrics", 'toka_steps_total{replica="scheduler:10310"}'),
        ("http://toka-rank-0:9400/metrics", "toka_worker_steps_total{"),
    ):
        told = compose("exec", "-T", "gateway", "python", "-c", page, url)
        assert metric in told, url


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_container_is_healthy_and_not_root(deployment, service):
    compose(*UP)  # also after a test that crashed something
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


def test_gateways_are_scaled_by_themselves_and_share_their_store(images):
    with running(scale=("--scale", "gateway=3"), TOKA_PORT=f"{PORT}-{PORT + 2}"):
        urls = [f"http://127.0.0.1:{PORT + index}" for index in range(3)]
        [answer] = {ask(url) for url in urls}
        assert answer
        client = OpenAI(base_url=f"{urls[0]}/v1", api_key="none")
        file = client.files.create(file=("lines.jsonl", b"{}\n"), purpose="batch")
        for url in urls:
            assert OpenAI(base_url=f"{url}/v1", api_key="none").files.content(file.id).content == b"{}\n"
        os.kill(inspect("gateway")["State"]["Pid"], signal.SIGKILL)
        eventually(lambda: {ask(url) for url in urls} == {answer}, "a gateway did not come back")


# A rank of the container's, as its own user sees it, is killed.
KILL_A_RANK = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"\\0tp_rank=1\\0" in path.read_bytes():
        os.kill(int(path.parent.name), signal.SIGKILL)
"""


def test_replicas_of_several_ranks_answer_and_recover(images, tmp_path):
    path = tmp_path / "mix.yml"
    path.write_text(overlay(build(ComposeConfig, {"dp": 2, "tp": 2, "device": "cpu"})))
    mix = ("-f", str(path))
    with running(*mix, TOKA_KV_CACHE_NUM_TOKENS="4096"):
        ready = httpx.get(f"{BASE_URL}/ready", timeout=60).json()
        assert {replica["address"] for replica in ready["replicas"] if replica["ready"]} == {
            "scheduler:10310",
            "scheduler-1:10310",
        }
        before = ask()
        for worker in ("worker", "worker-1"):
            restarts = inspect_with(mix, worker)["RestartCount"]
            compose(*mix, "exec", "-T", worker, "python", "-c", KILL_A_RANK)
            eventually(
                lambda worker=worker, restarts=restarts: inspect_with(mix, worker)["RestartCount"] > restarts,
                "a rank was killed, and its replica not restarted",
            )
        eventually(lambda: ask() == before, "the replicas did not come back")


def inspect_with(options: tuple[str, ...], service: str) -> dict[str, Any]:
    return json.loads(docker("inspect", compose(*options, "ps", "--all", "--quiet", service).strip()))[0]


def images_of(profile: str) -> None:
    """Fetch what it needs, or skip the test."""
    services = json.loads(compose("--profile", profile, "config", "--format", "json"))["services"]
    missing = [
        name
        for name, service in services.items()
        if profile in service.get("profiles", ()) and not has_image(service["image"])
    ]
    pull = [*COMPOSE, "--profile", profile, "pull", "--quiet", *missing]
    outcome = subprocess.run(pull, cwd=ROOT, capture_output=True, text=True) if missing else None
    if outcome is not None and outcome.returncode:
        pytest.skip(f"no images for the profile {profile}: {outcome.stderr.strip().splitlines()[-1]}")


def test_the_profile_postgres_keeps_what_gateways_store(images):
    images_of("postgres")
    with running("--profile", "postgres", TOKA_POSTGRES_PASSWORD="secret"):
        client = OpenAI(base_url=f"{BASE_URL}/v1", api_key="none")
        file = client.files.create(file=("lines.jsonl", b"{}\n"), purpose="batch")
        query = ["psql", "--username", "tokasaurus", "--tuples-only", "--command", "select id from toka_files"]
        assert file.id in compose("--profile", "postgres", "exec", "-T", "postgres", *query)


def test_the_profile_observability_shows_a_request(images):
    images_of("observability")
    with running("--profile", "observability", TOKA_OTLP_ENDPOINT="http://otel-collector:4317"):
        ask()
        prometheus, grafana, jaeger = (f"http://127.0.0.1:{port}" for port in (9090, 3000, 16686))

        def result(query: str) -> list[Any]:
            return httpx.get(f"{prometheus}/api/v1/query", params={"query": query}).json()["data"]["result"]

        eventually(lambda: sorted(each["metric"]["job"] for each in result("up == 1")) == sorted(SERVICES), "targets")
        eventually(lambda: len(result("toka_steps_total > 0")) == 1, "a figure is shown once")
        found = httpx.get(f"{grafana}/api/search", params={"type": "dash-db"}).json()
        assert {each["uid"] for each in found} == {"toka-overview", "toka-scheduler", "toka-workers"}
        traced = {f"toka-{name}" for name in SERVICES}
        eventually(lambda: traced <= set(httpx.get(f"{jaeger}/api/services").json()["data"] or ()), "no traces")
