"""docs/adding-a-model.md shows what is in the code."""

import re

from services.worker.described.registry import ARCHITECTURES
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()
SHOWN = re.findall(r"<!-- of (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


def test_code_that_is_shown_is_that_of_its_file():
    assert len(SHOWN) == 7
    for path, code in SHOWN:
        assert code in (ROOT / path).read_text(), path


def test_files_and_tests_that_are_named_are_there():
    named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", PAGE))
    folders = ROOT / "services" / "worker", ROOT
    alone = {path.name for folder in (*folders[:1], ROOT / "tests" / "worker") for path in folder.rglob("*.py")}
    alone |= {"modeling_qwen3_moe.py", "modeling_qwen3.py"}  # of transformers
    missing = {name for name in named if name not in alone and not any((folder / name).is_file() for folder in folders)}
    assert missing == set()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert all(f"def {name}(" in tests for name in re.findall(r"`(test_\w+)`", PAGE))


def test_the_readme_names_every_family_of_models():
    readme = (ROOT / "README.md").read_text()
    families = {re.match(r"[A-Z][a-z]+", name)[0].lower() for name in ARCHITECTURES}
    assert {family for family in families if family not in readme.lower()} == set()
