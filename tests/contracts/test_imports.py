"""The services keep apart: no torch outside the worker, no service inside another."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services"

LIST_MODULES = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def modules_of(service: str) -> list[str]:
    paths = sorted((SERVICES / service).rglob("*.py"))
    names = [".".join(("services", *path.relative_to(SERVICES).with_suffix("").parts)) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


def loaded_by(service: str) -> set[str]:
    """Every module that importing all of ``service`` loads, in a fresh interpreter."""
    command = [sys.executable, "-c", LIST_MODULES, *modules_of(service)]
    return set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.mark.parametrize("service", ["common", "gateway", "scheduler", "worker", "launcher"])
def test_a_service_imports_only_itself_and_what_is_common(service):
    own = {"services", f"services.{service}", "services.common"}
    strangers = {
        name for name in loaded_by(service) if name.startswith("services.") and ".".join(name.split(".")[:2]) not in own
    }
    assert strangers == set()


def test_the_client_is_a_gateway_without_a_server():
    loaded = {name for name in loaded_by("client") if name.startswith("services.")}
    assert {".".join(name.split(".")[:2]) for name in loaded} == {
        "services.client",
        "services.common",
        "services.gateway",
    }
    assert loaded_by("client") & {"uvicorn", "services.gateway.app"} == set()


@pytest.mark.parametrize("service", ["common", "gateway", "scheduler", "launcher", "client"])
def test_only_the_worker_loads_torch(service):
    assert loaded_by(service) & {"torch", "transformers", "numba"} == set()


def test_the_scheduler_and_what_is_common_load_no_http_server():
    assert (loaded_by("scheduler") | loaded_by("common")) & {"fastapi", "uvicorn", "starlette"} == set()


def test_the_scheduler_core_knows_no_wire():
    core = [name for name in modules_of("scheduler") if name.startswith("services.scheduler.core")]
    assert core
    command = [sys.executable, "-c", LIST_MODULES, *core]
    loaded = set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert {name for name in loaded if name.split(".")[0] in ("grpc", "google", "tokasaurus")} == set()
