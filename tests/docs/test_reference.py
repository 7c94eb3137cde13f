"""``docs/reference`` says what the code has."""

import runpy

import pytest

from services.common.config import DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """Every page by its name, made anew."""
    return runpy.run_path(str(ROOT / "docs" / "reference.py"))["pages"]()


def test_the_pages_are_up_to_date(made):
    assert {path.name for path in FOLDER.iterdir()} == set(made)
    stale = [name for name, text in made.items() if (FOLDER / name).read_text() != text]
    assert not stale, f"{', '.join(stale)}: run `make reference` and commit what it wrote"


def test_every_flag_says_what_it_means(made):
    for kind in (DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig):
        assert [name for name, field in kind.model_fields.items() if not field.description] == []
        assert [name for name in kind.model_fields if f"| `{name}` |" not in made["flags.md"]] == []


def test_every_parameter_of_a_body_says_what_it_means(made):
    bodies = made["http.md"].partition("## Objects in bodies")[0]
    mute = [line for line in bodies.splitlines() if line.endswith("| |") and "(in the " not in line]
    assert mute == []
