"""toka-compose writes what Compose takes, and what the programs in its containers take."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.config import GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.flags import Config, build, load
from services.launcher.compose import CUDA_PYTHON_IMAGE, MOST_RANKS, ComposeConfig, command, overlay
from services.worker.ranks import rank_environments, rank_flags

ROOT = Path(__file__).parents[2]
BASE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
KINDS = {"worker": WorkerConfig, "scheduler": SchedulerConfig, "gateway": GatewayConfig}
LISTENING = {
    "worker": {"TOKA_WORKER_LISTEN": "0.0.0.0:10410"},
    "scheduler": {"TOKA_SCHEDULER_LISTEN": "0.0.0.0:10310"},
    "gateway": {"TOKA_HOST": "0.0.0.0"},
}
MIXES = [{"dp": dp, "tp": tp, "pp": pp} for dp, tp, pp in itertools.product((1, 2, 3), (1, 2), (1, 2))]


class Loader(yaml.SafeLoader):
    """Knows Compose's ``!override`` and ``!reset``, which take the place of what is below."""


Loader.add_constructor(
    "!override",
    lambda loader, node: (
        loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.MappingNode)
        else loader.construct_sequence(node, deep=True)
    ),
)
Loader.add_constructor("!reset", lambda loader, node: None)


def services(**flags: Any) -> dict[str, dict[str, Any]]:
    return yaml.load(overlay(build(ComposeConfig, flags)), Loader)["services"]


def environment(name: str, service: dict[str, Any]) -> dict[str, str]:
    """What a container's program finds there when nobody has set a variable."""
    role = name.partition("-")[0]
    given = BASE["services"][role]["environment"] | service["environment"]
    plain = {key: re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", str(value)) for key, value in given.items()}
    return LISTENING[role] | {key: value for key, value in plain.items() if "$" not in value}


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_every_rank_of_every_replica_is_reached_by_its_scheduler(mix: dict[str, int]):
    written = services(**mix)
    configs: dict[str, list[Config]] = {}
    for name, service in written.items():
        found = environment(name, service)
        config = load(KINDS[name.partition("-")[0]], [], found)
        configs[name] = [config]
        if name.startswith("worker"):
            ranks = zip(rank_flags(config, []), rank_environments(config, found), strict=True)
            configs[name] = [load(WorkerConfig, flags, own) for flags, own in ranks]
    addresses = []
    for replica in range(mix["dp"]):
        suffix = f"-{replica}" if replica else ""
        workers = configs[f"worker{suffix}"]
        assert {worker.dp_rank for worker in workers} == {replica}
        assert len({(worker.tp_rank, worker.pp_rank) for worker in workers}) == mix["tp"] * mix["pp"]
        ports = [worker.worker_listen.rpartition(":")[2] for worker in workers]
        [scheduler] = configs[f"scheduler{suffix}"]
        assert scheduler.worker_addresses == tuple(f"worker{suffix}:{port}" for port in ports)
        assert scheduler.pp_size == mix["pp"]
        probed = written[f"worker{suffix}"]["healthcheck"]["test"]
        assert probed[-len(ports) :] == [f"127.0.0.1:{port}" for port in ports]
        addresses.append(f"scheduler{suffix}:10310")
    assert configs["gateway"][0].scheduler_addresses == tuple(addresses)


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_every_rank_has_a_gpu_of_its_own(mix: dict[str, int]):
    workers = [service for name, service in services(**mix).items() if name.startswith("worker")]
    seen = []
    for service in workers:
        [devices] = service["deploy"]["resources"]["reservations"]["devices"]
        seen += devices["device_ids"]
        inside = rank_environments(build(WorkerConfig, {"tp_size": mix["tp"], "pp_size": mix["pp"]}), {})
        assert [each["CUDA_VISIBLE_DEVICES"] for each in inside] == [str(i) for i in range(len(devices["device_ids"]))]
    assert seen == [str(index) for index in range(mix["dp"] * mix["tp"] * mix["pp"])]


def test_gpus_are_those_that_are_named():
    written = services(dp=2, gpus="5,GPU-1a2b")
    devices = [
        written[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("worker", "worker-1")
    ]
    assert devices == [["5"], ["GPU-1a2b"]]


def test_an_image_is_built_once_and_published_ports_differ():
    written = services(dp=3, tp=2)
    assert written["worker"]["build"]["args"] == {"VARIANT": "cuda", "PYTHON_IMAGE": CUDA_PYTHON_IMAGE}
    assert all(written[f"{role}-{index}"]["build"] is None for role in ("worker", "scheduler") for index in (1, 2))
    assert [written[f"scheduler-{index}"]["ports"] for index in (1, 2)] == [
        ["127.0.0.1:10311:10310"],
        ["127.0.0.1:10312:10310"],
    ]


def test_who_serves_starts_when_whom_it_needs_does():
    written = services(dp=3)
    assert list(written["scheduler-2"]["depends_on"]) == ["worker-2"]
    assert set(written["gateway"]["depends_on"]) == {"scheduler-1", "scheduler-2"}  # beside docker-compose.yml's


def test_dockerfile_has_what_is_asked_of_it():
    dockerfile = (ROOT / BASE["services"]["worker"]["build"]["dockerfile"]).read_text()
    arguments = services()["worker"]["build"]["args"]
    assert all(f"ARG {name}=" in dockerfile for name in arguments)
    assert f"AS base-{arguments['VARIANT']}\n" in dockerfile


@pytest.mark.parametrize("mix", [{}, {"dp": 2, "tp": 4}, {"device": "cpu", "dp": 2}], ids=str)
def test_the_file_of_a_mix_is_written_where_its_command_names_it(mix: dict[str, Any], tmp_path):
    (tmp_path / "docker").mkdir()
    config = build(ComposeConfig, mix)
    outcome = run(tmp_path, *(f"{name}={value}" for name, value in mix.items()))
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / config.path).read_text() == overlay(config)
    assert f"{command(config)} up --build --wait" in outcome.stdout


def test_what_is_included_is_named_as_what_is_written():
    [included] = yaml.safe_load((ROOT / "docker" / "compose.gpu.yml").read_text())["include"]
    for sizes in ({}, {"dp": 2, "tp": 4}):
        written = build(ComposeConfig, sizes)
        path = included["path"]
        for name in ("dp", "tp", "pp"):
            path = path.replace(f"${{TOKA_{name.upper()}:-1}}", str(sizes.get(name, 1)))
        assert path == written.path
        assert all(f"TOKA_{name.upper()}={sizes.get(name, 1)}" in command(written) for name in ("dp", "tp", "pp"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["tp=4", "pp=4"], f"a replica of 16 ranks, but a container has {MOST_RANKS} at most"),
        (["dp=0"], "flag dp='0': input should be greater than or equal to 1"),
        (["gpus=0,1"], "expected 1 GPUs, one for each of the dp=1 x tp=1 x pp=1 ranks"),
        (["dp=2", "gpus=3,3"], "3 is named twice"),
        (["gpus=0; rm"], "is neither a number nor a UUID"),
        (["gpus=0", "device=cpu"], "has no effect with device=cpu"),
        (["dp_size=2"], "unknown flag 'dp_size'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_flag(tmp_path, flags: list[str], said: str):
    outcome = run(tmp_path, *flags)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert said in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_elsewhere_it_says_where_to_run_it(tmp_path):
    outcome = run(tmp_path, "dp=2")
    assert outcome.returncode == 1
    assert "run it in the repository's directory" in outcome.stderr


def run(directory: Path, *flags: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKA_")}
    return subprocess.run(
        [sys.executable, "-m", "services.launcher.compose", *flags],
        cwd=directory,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "flags", [{"dp": 3, "tp": 2, "pp": 2}, {"dp": 2, "tp": 2, "device": "cpu", "grpc_port": 20310}], ids=str
)
def test_compose_itself_takes_it(tmp_path, flags: dict[str, Any]):
    config = build(ComposeConfig, flags)
    path = tmp_path / "mix.yml"
    path.write_text(overlay(config))
    found = compose_config("-f", str(path))
    assert set(found) == set(BASE["services"]) - profiled() | set(services(**flags))
    for replica in range(config.dp):
        suffix = f"-{replica}" if replica else ""
        worker, scheduler = found[f"worker{suffix}"], found[f"scheduler{suffix}"]
        assert ("build" in worker, "build" in scheduler) == (replica == 0, replica == 0)
        assert list(scheduler["depends_on"]) == [f"worker{suffix}"]
        assert scheduler["hostname"] == f"scheduler{suffix}"
        [port] = scheduler["ports"]
        assert port["published"] == str(config.grpc_port + replica)
        names = worker["networks"]["default"]["aliases"]
        assert names == [f"toka-rank-{rank}" for rank in range(config.ranks)]
        assert (worker["read_only"], worker["restart"]) == (True, "unless-stopped")
        assert worker["deploy"]["resources"]["limits"]["pids"]
    assert set(found["gateway"]["depends_on"]) - {"postgres"} == {
        name for name in found if name.startswith("scheduler")
    }


def test_compose_includes_the_mix_that_variables_name():
    outcome = run(ROOT, "dp=2", "tp=2")
    assert outcome.returncode == 0, outcome.stderr
    found = compose_config("-f", "docker/compose.gpu.yml", TOKA_DP="2", TOKA_TP="2")
    assert {"worker", "worker-1", "scheduler", "scheduler-1"} <= set(found)
    assert found["worker-1"]["environment"]["TOKA_TP_SIZE"] == "2"
    # What is mounted is the repository's, wherever the file lies that says so.
    assert all(
        Path(volume["source"]).is_relative_to(ROOT)
        for service in found.values()
        for volume in service["volumes"]
        if volume["type"] == "bind"
    )


def test_compose_names_the_file_of_a_mix_that_nobody_wrote():
    outcome = run_compose("-f", "docker/compose.gpu.yml", TOKA_DP="7")
    assert outcome.returncode != 0
    assert "docker/gpu/dp7-tp1-pp1.yml" in outcome.stderr


def profiled() -> set[str]:
    return {name for name, service in BASE["services"].items() if "profiles" in service}


def compose_config(*files: str, **variables: str) -> dict[str, dict[str, Any]]:
    outcome = run_compose(*files, **variables)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)["services"]


def run_compose(*files: str, **variables: str) -> subprocess.CompletedProcess:
    """``docker compose config``, which needs no engine; Compose before 2.24.4 knows no ``!override``."""
    asked = ["docker", "compose", "version", "--short"]
    version = subprocess.run(asked, capture_output=True, text=True).stdout if shutil.which("docker") else ""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (2, 24, 4):
        pytest.skip(f"Docker Compose 2.24.4 or later is not there (found: {version.strip() or 'none'})")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKA_")}
    return subprocess.run(
        ["docker", "compose", "-f", "docker-compose.yml", *files, "config", "--format", "json"],
        cwd=ROOT,
        env=clean | variables,
        capture_output=True,
        text=True,
    )
