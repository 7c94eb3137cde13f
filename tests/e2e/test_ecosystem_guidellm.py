"""guidellm's benchmark program against our servers. Needs ``pip install 'tokasaurus[ecosystem]'``."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.e2e.ecosystem import (
    CALL,
    CITY_FORMAT,
    CITY_TEXT,
    GREETING,
    TOO_LONG,
    WEATHER_TOOL,
    WRONG_CITY_TEXT,
    City,
)

REQUESTS = 3
PATIENCE_S = 100


@pytest.fixture(scope="package")  # as `parrot`, which then does not start if the test is skipped
def guidellm() -> list[str]:
    """Return the command that starts guidellm, or skip."""
    if importlib.util.find_spec("guidellm") is None:
        pytest.skip("guidellm is not installed")
    return [sys.executable, "-m", "guidellm"]


@pytest.fixture
def benchmark(guidellm, parrot, tmp_path):
    """Return a function that sends ``rows`` and returns guidellm's requests by their outcome."""

    def benchmark(rows: list[dict], body: dict | None = None, **backend) -> dict[str, list[dict]]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        backend |= {"kind": "openai_http", "target": parrot.url, "extras": {"body": body or {}}}
        scenario = {
            "metadata": {"name": "smoke", "description": "Smoke test"},
            "spec": {
                "backend": backend,
                "profile": {"kind": "synchronous"},
                "constraints": [{"kind": "max_requests", "count": len(rows)}],
                "data": [{"kind": "json_file", "path": "rows.jsonl"}],
                "outputs": [{"kind": "json", "path": "report.json"}],
            },
        }
        (tmp_path / "scenario.json").write_text(json.dumps(scenario))
        command = [*guidellm, "run", "--config", "scenario.json", "--disable-console"]
        # Rows are a local file: nothing may be downloaded.
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["requests"]

    return benchmark


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/responses"])
def test_guidellm_streams_chats_and_counts_their_tokens(benchmark, request_format):
    done = benchmark([{"prompt": GREETING}] * REQUESTS, stream=True, request_format=request_format)
    assert [request["output"] for request in done["successful"]] == [GREETING] * REQUESTS
    assert not done["errored"]
    for request in done["successful"]:
        assert request["input_metrics"]["text_tokens"] > 2
        assert request["output_metrics"]["text_tokens"] > 2


def test_guidellm_gets_answers_of_the_length_that_it_asks_for(benchmark):
    done = benchmark([{"prompt": GREETING, "output_tokens_count": 40}] * REQUESTS, stream=True)
    assert [request["output_metrics"]["text_tokens"] for request in done["successful"]] == [40] * REQUESTS


def test_guidellm_calls_tools(benchmark):
    row = {"prompt": CALL, "tools": json.dumps([WEATHER_TOOL]), "tool_choice": "auto"}
    done = benchmark([row], stream=True)
    assert not done["errored"]
    (call,) = done["successful"][0]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Köln"})


def test_guidellm_gets_objects_of_the_schema(benchmark):
    rows = [{"prompt": CITY_TEXT}, {"prompt": WRONG_CITY_TEXT}]
    done = benchmark(rows, {"response_format": CITY_FORMAT, "max_tokens": 100}, stream=False)
    cities = [City.model_validate_json(request["output"]) for request in done["successful"]]
    assert len(cities) == 2
    assert City.model_validate_json(CITY_TEXT) in cities


def test_guidellm_counts_a_full_context_as_an_error(benchmark):
    done = benchmark([{"prompt": TOO_LONG}])
    assert not done["successful"]
    assert "400 Bad Request" in done["errored"][0]["info"]["error"]
