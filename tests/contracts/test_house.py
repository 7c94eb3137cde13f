"""Rules of the house that no linter looks at."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rooms import ROOMS, Room

ROOT = Path(__file__).parents[2]
SOURCES = ("services", "protos", "tests", "bench", "training", "docs", "docker", "examples")
MOST_LINES = 400
EXCUSE = "Longer than 400 lines: "  # followed by the reason, in the module's docstring


def sources() -> list[Path]:
    paths = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".proto", ".js")
    ]
    return [path for path in paths if not ({"node_modules", "__pycache__"} & set(path.parts) or "_pb2" in path.name)]


def unexcused(path: Path) -> int:
    """How many lines it has, if those are too many and it does not say why."""
    text = path.read_text()
    lines = text.count("\n")
    if lines <= MOST_LINES:
        return 0
    head = (ast.get_docstring(ast.parse(text)) or "") if path.suffix == ".py" else text[:1000]
    return 0 if EXCUSE in head else lines


def test_no_file_is_long_without_a_reason():
    found = sources()
    assert len(found) > 500
    assert {str(path.relative_to(ROOT)): lines for path in found if (lines := unexcused(path))} == {}


@pytest.mark.parametrize(("docstring", "lines"), [("Words.", 402), (f"Words. {EXCUSE}a table.", 0)])
def test_a_long_file_needs_a_reason_in_its_docstring(docstring, lines, tmp_path):
    path = tmp_path / "long.py"
    path.write_text(f'"""{docstring}"""\n' + "\n" * 401)
    assert unexcused(path) == lines


def test_the_hooks_before_a_commit_can_be_read_and_fetch_nothing(tmp_path):
    config = ROOT / ".pre-commit-config.yaml"
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(config)]
    environment = os.environ | {"PRE_COMMIT_HOME": str(tmp_path)}  # it makes a database, whatever it is asked
    checked = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {line.strip() for line in config.read_text().splitlines() if "repo:" in line} == {"- repo: local"}


def test_mutants_are_tried_with_tests_that_exist():
    for room in ROOMS.values():
        assert (ROOT / room.path).exists()
        assert room.test_files()


def test_a_room_that_names_a_test_that_does_not_exist_is_an_error():
    room = Room("services/scheduler/core", ("tests/scheduler/core/test_*.py", "tests/scheduler/test_forgotten.py"))
    with pytest.raises(LookupError, match=r"tests/scheduler/test_forgotten\.py, .* matches no file"):
        room.test_files()
