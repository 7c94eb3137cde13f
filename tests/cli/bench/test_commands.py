"""``toka-bench``: it tells what the server did, and what went wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.server import free_port
from services.cli.bench.app import main
from tests.cli import running
from tests.gateway.deployment import PATIENCE_S, Deployment, eventually

PROBLEMS = Path(__file__).parents[3] / "bench" / "data" / "coverage_problems.jsonl"
# By the gateway itself, when a sample ends: schedulers tell theirs a moment later.
COUNTED = {
    "input_tokens": "toka_request_prompt_tokens_sum",
    "output_tokens": "toka_request_generation_tokens_sum",
    "samples": "toka_request_success_total",
}


def run(*arguments: object, status: int = 0, **environment: str) -> tuple[str, str]:
    """Standard output and error."""
    keys = dict.fromkeys(("OPENAI_API_KEY", "TOKA_API_KEY"))
    outcome = running.run(main, *map(str, arguments), environment=keys | {"COLUMNS": "120"} | environment)
    assert outcome.status == status, outcome.output
    return outcome.stdout, outcome.stderr


class Measured:
    """What the server has counted since."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._before = self._now()

    def grown(self) -> dict[str, float]:
        now = self._now()
        return {name: now[name] - before for name, before in self._before.items()}

    def _now(self) -> dict[str, float]:
        return {name: self._deployment.metric(metric) for name, metric in COUNTED.items()}


def in_order(spread: dict[str, float]) -> bool:
    values = [spread[name] for name in ("p50", "p90", "p99", "most")]
    return values == sorted(values)


def test_serve_counts_what_the_server_counts(deployment, tmp_path):
    server = Measured(deployment)
    output, _ = run(
        "serve", "--url", deployment.url + "/v1", "--requests", 30, "--concurrency", 6, "--clients", 2, "--warmup", 0,
        "--prompt-tokens", "8-40", "--output-tokens", "lognormal:12,0.5,30",
        "--json", tmp_path / "out.json",
    )  # fmt: skip
    told = json.loads((tmp_path / "out.json").read_text())
    grown = server.grown()
    assert told["succeeded"] == grown["samples"] == 30
    assert told["input_tokens"] == grown["input_tokens"]
    assert told["output_tokens"] == grown["output_tokens"]
    assert told["failed"] == told["unfinished"] == 0
    assert told["requests_per_second"] == pytest.approx(30 / told["seconds"])
    assert told["model"] == "tokasaurus-builtin"
    for name in ("first_token_ms", "inter_token_ms", "per_token_ms", "end_to_end_ms"):
        assert in_order(told[name]), name
    assert 0 < told["first_token_ms"]["p50"] <= told["end_to_end_ms"]["p50"]
    assert f"{told['output_tokens']:,}" in output
    assert all(row in output for row in ("first token", "inter-token", "end to end", "p99", "█"))


def test_a_seed_gives_the_same_arrivals_and_prompts_and_warming_up_does_not_count(deployment, tmp_path):
    told = []
    for name in ("first", "second"):
        server = Measured(deployment)
        arguments = ["--rate", 40, "--duration", 0.5, "--seed", 5, "--output-tokens", 4, "--warmup", 2, "--chat"]
        run("serve", "--url", deployment.url, *arguments, "--json", tmp_path / name)
        told.append(json.loads((tmp_path / name).read_text()))
        assert server.grown()["samples"] == told[-1]["succeeded"] + 2
    first, second = told
    assert 5 < first["succeeded"] == second["succeeded"] < 50
    assert first["input_tokens"] == second["input_tokens"]


def test_monkeys_asks_for_samples_of_a_dataset(deployment, tmp_path):
    server = Measured(deployment)
    run(
        "monkeys", "--url", deployment.url, "--problems", 2, "--samples", 8, "--requests-per-problem", 2, "--shots", 1,
        "--dataset", PROBLEMS, "--output-tokens", 5, "--json", tmp_path / "out.json",
    )  # fmt: skip
    told = json.loads((tmp_path / "out.json").read_text())
    grown = server.grown()
    assert told["succeeded"] == 4
    assert told["output_tokens"] == grown["output_tokens"] - 4  # of the request that warms up
    assert told["output_tokens"] <= 2 * 8 * 5
    assert grown["samples"] == 2 * 8 + 1
    assert told["first_token_ms"] is None
    assert told["end_to_end_ms"]["p50"] > 0


def test_latency_measures_streams_in_rounds(deployment, tmp_path):
    server = Measured(deployment)
    arguments = ["--streams", "1,3", "--rounds", 1, "--prompt-tokens", 9, "--vocab-size", 2000, "--output-tokens", 6]
    output, _ = run("latency", "--url", deployment.url, *arguments, "--json", tmp_path / "out.json")
    told = json.loads((tmp_path / "out.json").read_text())
    assert server.grown() == {"samples": 8, "input_tokens": 8 * 9, "output_tokens": 8 * 6}
    assert set(told["streams"]) == {"1", "3"}
    for times in told["streams"].values():
        assert times["failures"] == 0
        assert 0 < times["first_token_ms"] <= times["first_token_p99_ms"]
    assert "ms per token" in output


def test_failures_are_counted_by_kind_and_end_with_status_1(deployment, tmp_path):
    asked = ("serve", "--url", deployment.url, "--requests", 3, "--extra-body", '{"top_p": 7}')
    output, _ = run(*asked, "--warmup", 0, "--json", tmp_path / "out.json", status=1)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["failed"] == 3
    assert told["errors"]["HTTP 400"]["count"] == 3
    assert "top_p" in told["errors"]["HTTP 400"]["example"]
    assert "3 x HTTP 400" in output
    _, errors = run(*asked, status=1)
    assert "does not serve such requests" in errors
    assert "top_p" in errors


def test_a_late_answer_and_a_missing_server_are_failures(deployment, tmp_path):
    arguments = ["--requests", 2, "--warmup", 0, "--output-tokens", 1000, "--json", tmp_path / "out.json"]
    run("serve", "--url", deployment.url, "--timeout", 0.05, *arguments, status=1)
    assert json.loads((tmp_path / "out.json").read_text())["errors"]["timeout"]["count"] == 2
    nowhere = f"http://127.0.0.1:{free_port()}"
    run("serve", "--url", nowhere, "--model", "m", *arguments, status=1)
    assert json.loads((tmp_path / "out.json").read_text())["errors"]["no connection"]["count"] == 2
    _, errors = run("serve", "--url", nowhere, status=1)
    assert "is a server running there?" in errors


@pytest.mark.slow
def test_ctrl_c_tells_what_was_measured_so_far_and_leaves_nothing(deployment, tmp_path):
    server = Measured(deployment)
    arguments = ["--duration", 600, "--concurrency", 4, "--output-tokens", 8, "--clients", 2]
    arguments += ["--url", deployment.url, "--json", tmp_path / "out.json"]
    command = [sys.executable, "-m", "services.cli.bench", "serve", *map(str, arguments)]
    # A group of its own, as a shell makes one: Ctrl-C goes to all processes of a group.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    eventually(lambda: server.grown()["samples"] > 100)  # more than come between two reports
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "so far" in output
    assert "Traceback" not in errors
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["interrupted"]
    assert told["failed"] == 0
    assert 0 < told["succeeded"] <= server.grown()["samples"]
    eventually(lambda: not any(child.is_running() for child in children))
    eventually(lambda: deployment.metric("toka_num_requests_running") == 0)
