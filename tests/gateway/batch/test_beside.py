"""Online requests while a batch has every slot."""

import pytest

from tests.gateway.batch.requests import COMPLETIONS, RESPONSES, begin, line
from tests.gateway.deployment import Deployment, eventually

SLOTS = 4


@pytest.fixture
def small(tmp_path):
    """A deployment with few slots, whose steps take a while."""
    running = Deployment(tmp_path, worker={"max_slots": SLOTS, "step_ms": 5}).wait_ready()
    yield running
    running.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"max_tokens": 2000, "ignore_eos": True}),
        (RESPONSES, {"max_output_tokens": 2000}),
    ],
)
def test_a_request_is_answered_before_any_line_that_runs_has_ended(small, endpoint, body):
    with small.sdk() as sdk:
        batch = begin(sdk, [line(f"r{number}", endpoint, **body) for number in range(12)], endpoint)
        eventually(lambda: small.metric("toka_num_requests_running") == SLOTS)
        for _ in range(3):
            answer = small.complete(prompt="Hi", max_tokens=3)
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert sdk.batches.retrieve(batch.id).request_counts.completed == 0
        eventually(lambda: small.metric("toka_yields_total") >= 1)  # metrics lag behind
        sdk.batches.cancel(batch.id)
        eventually(lambda: sdk.batches.retrieve(batch.id).status == "cancelled")
