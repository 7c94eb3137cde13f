"""What a service loads in a fresh interpreter, by way of third parties too. Which of our packages may import which is
written in pyproject.toml, under ``tool.importlinter``, and looked at by ``make lint``."""

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

COMPUTING = {"torch", "transformers", "numba", "triton"}
SERVING_HTTP = {"fastapi", "uvicorn", "starlette"}


def modules_of(service: str) -> list[str]:
    paths = sorted((SERVICES / service).rglob("*.py"))
    names = [".".join(("services", *path.relative_to(SERVICES).with_suffix("").parts)) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


def loaded_by(service: str) -> set[str]:
    """Every module that importing all of ``service`` loads."""
    command = [sys.executable, "-c", LIST_MODULES, *modules_of(service)]
    return set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.mark.parametrize(
    ("service", "never"),
    [
        ("common", COMPUTING | SERVING_HTTP),
        ("gateway", COMPUTING | {"services.scheduler", "services.worker"}),
        ("scheduler", COMPUTING | SERVING_HTTP | {"services.gateway", "services.worker"}),
        pytest.param("worker", SERVING_HTTP | {"services.gateway", "services.scheduler"}, marks=pytest.mark.slow),
        ("launcher", COMPUTING),
        ("client", COMPUTING | {"uvicorn"}),
        pytest.param("cli", COMPUTING, marks=pytest.mark.slow),
    ],
)
def test_a_service_loads_neither_others_nor_what_only_they_need(service, never):
    assert loaded_by(service) & never == set()
