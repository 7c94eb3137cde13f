"""The figures of ``bench.live``: why the device idles, and where the time to the first token goes."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench.live import idle_shares
from bench.watch import Sample
from bench.waterfall import STAGES, Waterfall, mean
from services.cli.bench.exchange import Reply


def sample(at: float, busy: float, idle: float, running: int = 0, waiting: int = 0, late: float = 0.0) -> Sample:
    metrics = {
        "toka_device_busy_seconds_total": busy,
        "toka_device_idle_seconds_total": idle,
        "toka_device_late_seconds_total": late,
        "toka_num_requests_running": running,
        "toka_num_requests_waiting": waiting,
    }
    return Sample(at, metrics, {})


def test_idle_time_is_divided_by_its_cause():
    samples = [
        sample(9.0, 1.0, 0.5),  # of unknown age
        sample(10.0, 1.25, 0.5),
        sample(11.0, 1.5, 0.75),  # without sequences for half of this second
        sample(11.5, 1.5, 0.75, running=3),  # not updated yet
        sample(12.0, 2.0, 1.0, running=3, late=0.125),
        sample(14.0, 3.5, 1.25, running=3, late=0.125),  # no step was planned for a quarter of a second
        sample(14.5, 3.5, 1.25),
    ]
    host, plan, requests = 0.25 + 0.125 + 0.25, 0.125 + 0.25 + 0.25, 0.5
    assert idle_shares(samples) == pytest.approx({"host": host / 4, "plan": plan / 4, "requests": requests / 4})


def test_figures_that_are_updated_between_some_samples_only_show_no_idle_time():
    # The server updates its figures every 0.2 seconds, and a sample is taken every 0.3 seconds.
    samples = [sample(0.3 * number, 0.2 * int(1.5 * number + 1e-6), 0.0, running=3) for number in range(42)]
    assert idle_shares(samples) == pytest.approx({"host": 0.0, "plan": 0.0, "requests": 0.0}, abs=0.01)


def test_a_server_without_figures_of_its_device_has_no_idle_shares():
    assert idle_shares([Sample(1.0, {}, {}), Sample(2.0, {}, {})]) == {}
    assert idle_shares([]) == {}
    assert idle_shares([sample(1.0, 0, 0), sample(2.0, 0, 0, running=4)]) == {}  # a CPU


def span(service: str, name: str, start_ms: float, end_ms: float):
    return SimpleNamespace(service=service, name=name, start=round(start_ms * 1e6), end=round(end_ms * 1e6))


SPANS = [
    span("toka-gateway", "POST /v1/completions", 1001, 1090),
    span("toka-scheduler", "request", 1003, 1080),
    span("toka-scheduler", "queue", 1003, 1006),
    span("toka-scheduler", "prefill", 1006, 1025),
    span("toka-scheduler", "decode", 1025, 1080),
    span("toka-worker", "prefill", 1010, 1020),
]
REPLY = Reply(sent_at=0.0, first_at=0.032, last_at=0.09, ended_at=0.1, prompt_tokens=4, completion_tokens=9)


def test_the_stages_of_a_request_add_up_to_its_time_to_the_first_token():
    found = Waterfall.of(REPLY, SPANS, offset_ns=1_000_000_000)
    assert found is not None
    assert [found.stages[name] for name in STAGES] == pytest.approx([1, 2, 3, 4, 10, 5, 7])
    assert found.first_token_ms == pytest.approx(32)
    assert mean([found, found]) == found.stages


@pytest.mark.parametrize("missing", [0, 1, 2, 3, 5])
def test_a_request_without_one_of_its_spans_has_no_stages(missing):
    assert Waterfall.of(REPLY, [*SPANS[:missing], *SPANS[missing + 1 :]], 0) is None
    assert mean([]) == {}


@pytest.mark.slow
def test_a_started_server_has_stages(tmp_path):
    flags = ["rates=4", "seconds=2", "prompt_tokens=4-8", "output_tokens=4", "vocab_size=2000", "clients=1", "batch=T"]
    outcome = subprocess.run([sys.executable, "-m", "bench.live", *flags], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])["4"]
    assert figures["traced"] > 0
    assert list(figures["waterfall_ms"]) == list(STAGES)
