"""The programs that measure batches, small."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def run(program: str, **flags: Any) -> dict[str, Any]:
    """The figures of ``program``, which must end well."""
    command = [sys.executable, "-m", f"bench.{program}", *(f"{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)  # leases of the dead take ten seconds each
def test_a_batch_under_fire_says_what_it_says_in_peace():
    # Lines for seconds: the program looks at the batch every 0.2 s, and kills the last process halfway.
    figures = run("batch_kills", lines=2400, kills=3, line_bytes=500)
    assert figures["killed"] == {"gateway": 1, "scheduler": 1, "worker": 1}
    assert (figures["answered"], figures["missing"], figures["twice"], figures["different"]) == (2400, 0, 0, 0)
    assert figures["gateway_mb"]["most"] >= figures["gateway_mb"]["idle"] > 0


def test_requests_beside_a_batch_take_the_place_of_lines():
    figures = run("online_beside_batch", worker="fake", slots=8, requests=10, gap_ms=100, line_tokens=200)
    assert figures["yields"] > 0
    assert set(figures["ratio"]) == set(figures["alone"]) == set(figures["beside_batch"])


def test_a_job_of_one_key_is_measured_beside_those_of_another():
    figures = run(
        "batch_fairness", large_jobs=2, large_lines=20_000, large_bytes=2_000_000, small_jobs=0, probes=1,
        most_seconds=100,
    )  # fmt: skip
    assert figures["alone"]["most_s"] > 0
    assert figures["beside"]["most_s"] > 0


def test_a_store_that_holds_much_is_measured():
    figures = run("large_store", rows=3000, runs=1, most_ms=60_000)
    assert figures["times"]["expire responses"]["count"] >= 6
