"""The recipes of ``docs/contributing.md``: their patches apply to this tree, and their commands succeed there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "contributing.md"
RECIPES = {text.partition("\n")[0]: text for text in PAGE.read_text().split("\n## ")[1:]}

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a git checkout")
of_recipes = pytest.mark.parametrize("name", RECIPES)


def block(name: str, language: str) -> str:
    """Return the only block of a recipe in ``language``."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", RECIPES[name], re.M | re.S)
    return found


def test_there_is_a_recipe_for_each_common_change():
    assert [name.split(" of ")[0] for name in RECIPES] == [
        "Add a model",
        "Add a sampling parameter",
        "Add an endpoint",
        "Add a scheduling policy",
    ]


@of_recipes
def test_the_table_names_every_file_of_the_patch(name):
    cells = re.findall(r"^\| (`.*?) \|", RECIPES[name], re.M)
    named = {path for cell in cells for path in re.findall(r"`(\S+?)`", cell)}
    changed = set(re.findall(r"^\+\+\+ b/(\S+)$", block(name, "diff"), re.M))
    assert changed <= named
    assert all(path.endswith((".md", ".binpb")) and (ROOT / path).is_file() for path in named - changed)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that git does not ignore, and of the contracts' generated stubs."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    stubs = (str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*_pb2*"))
    for name in {*filter(None, names), *stubs}:
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


@of_recipes
def test_a_patch_applies_to_this_tree(name):
    subprocess.run(("git", "apply", "--check", "-"), cwd=ROOT, input=block(name, "diff"), check=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)  # each command imports the project anew
@of_recipes
def test_a_recipe_works_as_it_is_written(name, tree):
    subprocess.run(("git", "apply", "-"), cwd=tree, input=block(name, "diff"), check=True, text=True)
    without_xdist = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    for command in block(name, "sh").splitlines():
        program, *arguments = command.split()
        assert program == ".venv/bin/python"
        done = subprocess.run(
            (sys.executable, *arguments),
            cwd=tree,
            env=without_xdist | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'protos'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
