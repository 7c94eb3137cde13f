"""Grafana's dashboards against what a real Prometheus has got from a real deployment: no panel asks in vain."""

import math
import re
import threading
import time

import pytest

from bench.prometheus import is_installed, prometheus
from docs.dashboards import CAPTION, TARGETS, dashboard, deployment, draw, expression, traffic, variables
from tests.gateway.deployment import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs Prometheus, as Debian's package has it"),
    pytest.mark.timeout(300),  # a worker boots
]

EVERY_S = 1
OF_GPUS = {"Power", "Tokens per joule"}  # what their driver tells


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A Prometheus that sees some traffic."""
    directory, over = tmp_path_factory.mktemp("prometheus"), threading.Event()
    with deployment(1, torch_num_threads=1) as (server, pages), prometheus(directory, pages, EVERY_S) as made:
        threads = traffic(server, over, clients=1)
        try:
            yield made
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("name", TARGETS)
def test_every_panel_has_something_to_show(asked, name):
    """Each of its lines, but for those of GPUs."""
    board = dashboard(name)

    def empty() -> set[str]:
        return {
            panel["title"]
            for panel in board["panels"]
            for target in panel["targets"]
            if not any(
                math.isfinite(value)
                for series in asked.now(expression(target, board, EVERY_S))
                for _, value in series.points
            )
        }

    expected = OF_GPUS if name == "workers" else set()
    until = time.monotonic() + PATIENCE_S
    while (found := empty()) != expected:
        assert time.monotonic() < until, f"nothing to show in {found}, and not just in {expected}"
        time.sleep(EVERY_S)
    for metric, label in variables(board):
        assert asked.values(label, metric), (metric, label)


def test_no_figure_is_counted_twice(asked):
    """A gateway shows its schedulers' figures, which Prometheus has from them already."""
    assert [series.labels for series in asked.now("count by (job) (toka_steps_total)")] == [{"job": "scheduler"}]
    assert [series.labels for series in asked.now("count by (job) (toka_replica_ready)")] == [{"job": "gateway"}]
    assert {series.labels["job"] for series in asked.now("process_cpu_seconds_total")} == {
        "gateway", "scheduler", "worker",
    }  # fmt: skip


def test_dashboards_are_drawn_with_what_is_missing_said(asked, tmp_path):
    end = time.time()
    draw("workers", asked, end - 10, end, EVERY_S, tmp_path / "workers.svg")
    text = re.findall(r"<!-- (.+?) -->", (tmp_path / "workers.svg").read_text())
    assert {panel["title"] for panel in dashboard("workers")["panels"]} <= set(text)
    assert text.count("No data") == 3
    assert CAPTION in text
