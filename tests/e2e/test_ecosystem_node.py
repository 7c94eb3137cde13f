"""Node's ``openai`` and the Vercel AI SDK against our servers.

They need ``node``, and a directory in which npm installed them::

    npm install --prefix DIR openai ai @ai-sdk/openai-compatible zod
    ECOSYSTEM_NODE=DIR python -m pytest tests/e2e/test_ecosystem_node.py
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.ecosystem import (
    CALL,
    CITY_TEXT,
    CONTEXT_MESSAGE,
    GREETING,
    REPORT,
    TOO_LONG,
    WRONG_CITY_TEXT,
    City,
)

SCRIPTS = Path(__file__).parent / "node"
CASES = {"greeting": GREETING, "call": CALL, "cities": [CITY_TEXT, WRONG_CITY_TEXT], "tooLong": TOO_LONG}
PATIENCE_S = 100


@pytest.fixture(scope="package")  # as `parrot`, which then does not start if the test is skipped
def modules() -> Path:
    """Return the directory ``node_modules``, or skip."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (directory := os.environ.get("ECOSYSTEM_NODE")):
        pytest.skip("ECOSYSTEM_NODE does not name a directory with npm packages")
    return Path(directory).resolve() / "node_modules"


def need(modules: Path, *packages: str) -> None:
    """Skip if a package is missing."""
    if missing := [name for name in packages if not (modules / name / "package.json").exists()]:
        pytest.skip(f"{modules} has no {', '.join(missing)}")


def run(script: str, modules: Path, directory: Path, url: str) -> dict:
    """Run a script of tests/e2e/node beside ``modules``. Returns the JSON object that it prints."""
    shutil.copy(SCRIPTS / script, directory)
    (directory / "node_modules").symlink_to(modules)
    command = ["node", script, f"{url}/v1", json.dumps(CASES)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(printed: dict) -> None:
    """Assert what the scripts have in common."""
    assert printed["chat"] == "".join(printed["stream"]) == GREETING
    assert len(printed["stream"]) > 1
    right, corrected = (City.model_validate(city) for city in printed["schema"])
    assert right == City.model_validate_json(CITY_TEXT)
    assert corrected.name in ("Köln", "Bonn")
    assert CONTEXT_MESSAGE in printed["full"]["message"]


def test_the_openai_package_for_node(modules, parrot, tmp_path):
    need(modules, "openai", "zod")
    printed = run("openai.mjs", modules, tmp_path, parrot.url)
    check(printed)
    assert printed["tools"] == REPORT
    assert "".join(printed["responses"]) == GREETING
    assert (printed["full"]["type"], printed["full"]["code"]) == ("BadRequestError", "context_length_exceeded")


def test_the_vercel_ai_sdk(modules, parrot, tmp_path):
    need(modules, "ai", "@ai-sdk/openai-compatible", "zod")
    printed = run("ai.mjs", modules, tmp_path, parrot.url)
    check(printed)
    assert printed["tools"] == [REPORT, REPORT]
    assert printed["usage"][0] == printed["usage"][1] > 2
    full = printed["full"]
    assert (full["type"], full["status"], full["code"]) == ("AI_APICallError", 400, "context_length_exceeded")
