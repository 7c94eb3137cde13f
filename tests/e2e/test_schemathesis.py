"""Requests made from ``/openapi.json`` by Schemathesis: none may be answered with 500, and every answer is what the
document says. Needs ``pip install 'tokasaurus[ecosystem]'``."""

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.gateway.deployment import Deployment

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

# What others warn of each other is not ours.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip


@pytest.fixture
def deployment(tmp_path):
    """A gateway with a fake worker."""
    running = Deployment(tmp_path).wait_ready()
    yield running
    running.stop()


def test_every_answer_is_as_described(deployment):
    """``SCHEMATHESIS_EXAMPLES`` for each operation, 30 unless it says otherwise; right ones and wrong ones."""
    examples = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "30"))
    operations = [
        found.ok() for found in schemathesis.openapi.from_url(f"{deployment.url}/openapi.json").get_all_operations()
    ]
    assert len(operations) > 20
    for operation in operations:

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy(GenerationMode.POSITIVE) | operation.as_strategy(GenerationMode.NEGATIVE))
        def check(case):
            answer = case.call(timeout=60)
            asked = isinstance(case.body, dict) and case.body.get("timeout") is not None
            # Who asks for an answer within moments may be told that they have passed.
            late = [not_a_server_error] if asked and answer.status_code == 504 else []
            case.validate_response(answer, checks=CHECKS, excluded_checks=late)

        check()
    assert deployment.complete(prompt="x", max_tokens=3).status_code == 200
