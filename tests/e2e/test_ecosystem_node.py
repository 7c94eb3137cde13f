"""Node's ``openai``, the Vercel AI SDK and promptfoo against our servers.

They need ``node``, and a directory in which npm installed them::

    npm install --prefix DIR openai ai @ai-sdk/openai-compatible zod promptfoo
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
    CITY_FORMAT,
    CITY_TEXT,
    CONTEXT_MESSAGE,
    GREETING,
    REPORT,
    TOO_LONG,
    WEATHER_TOOL,
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


@pytest.fixture
def evaluate(modules, parrot, tmp_path):
    """Return a function that has promptfoo send ``said`` once, and returns its result."""
    need(modules, "promptfoo")
    quiet = {f"PROMPTFOO_DISABLE_{what}": "1" for what in ("TELEMETRY", "UPDATE", "REMOTE_GENERATION", "SHARING")}

    def evaluate(said: str, **settings) -> dict:
        settings |= {"apiBaseUrl": f"{parrot.url}/v1", "apiKey": "none"}
        suite = {
            "prompts": ['[{"role": "user", "content": {{said | dump}}}]'],
            "providers": [{"id": "openai:chat:llm", "config": settings}],
            "tests": [{"vars": {"said": said}}],
        }
        (tmp_path / "suite.json").write_text(json.dumps(suite))
        program = modules / ".bin" / "promptfoo"
        command = [program, "eval", "-c", "suite.json", "-o", "results.json", "--no-cache", "--no-table"]
        environment = os.environ | quiet | {"PROMPTFOO_CONFIG_DIR": str(tmp_path / "settings")}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        results = tmp_path / "results.json"
        assert results.exists(), done.stdout + done.stderr
        (result,) = json.loads(results.read_text())["results"]["results"]
        return result

    return evaluate


def test_promptfoo_chats(evaluate):
    result = evaluate(GREETING)
    assert (result["success"], result["response"]["output"]) == (True, GREETING)
    assert result["response"]["tokenUsage"]["completion"] > 2


def test_promptfoo_calls_tools(evaluate):
    (call,) = evaluate(CALL, tools=[WEATHER_TOOL])["response"]["output"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Köln"})


@pytest.mark.parametrize("said", [CITY_TEXT, WRONG_CITY_TEXT])
def test_promptfoo_gets_an_object_of_the_schema(evaluate, said):
    city = City.model_validate(evaluate(said, response_format=CITY_FORMAT, max_tokens=100)["response"]["output"])
    assert said != CITY_TEXT or city == City.model_validate_json(CITY_TEXT)


def test_promptfoo_reports_a_full_context(evaluate):
    result = evaluate(TOO_LONG)
    assert not result["success"]
    assert CONTEXT_MESSAGE in result["error"]
