"""docs/grpc.md, for those who have nothing else: its messages are messages, its reasons those of the code."""

import re

import pytest
from google.protobuf import json_format

from tests.clients.builds import ROOT
from tests.scheduler.service import start
from tokasaurus.scheduler.v1 import generate_pb2, session_pb2

PAGE = (ROOT / "docs/grpc.md").read_text()
EXAMPLES = re.findall(r"^```json (\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
REQUESTS = [text for kind, text in EXAMPLES if kind == "GenerateRequest"]


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_an_example_is_a_message(kind, text):
    module = session_pb2 if kind.startswith("Session") else generate_pb2
    assert json_format.Parse(text, getattr(module, kind)()).ByteSize()


async def test_a_scheduler_takes_the_requests_of_the_page():
    assert len(REQUESTS) == 2
    async with start() as service:
        for text in REQUESTS:
            request = json_format.Parse(text, generate_pb2.GenerateRequest())
            news = [each async for each in service.stub.Generate(request)]
            assert news[0].HasField("accepted")
            finished = [sample for each in news for sample in each.outputs.samples if sample.HasField("finish")]
            assert len(finished) == (request.n or 1)


def test_every_reason_is_told_and_none_that_there_is_not():
    table = PAGE.partition("## Errors")[2].partition("**Retries.**")[0]
    told = set(re.findall(r"`([A-Z][A-Z_]+)`", table))
    sources = [path for part in ("scheduler", "common") for path in (ROOT / "services" / part).rglob("*.py")]
    raised = {reason for path in sources for reason in re.findall(r'\breason ?= ?"([A-Z_]+)"', path.read_text())}
    # Of HTTP, and of errors that no scheduler raises.
    elsewhere = {
        "ERROR", "PAYLOAD_TOO_LARGE", "UNSUPPORTED_MEDIA_TYPE", "IDEMPOTENCY_KEY_REUSED", "PERMISSION_DENIED",
        "DEADLINE_EXCEEDED", "STORE_UNAVAILABLE", "TOO_MANY_VALUES", "TOO_MANY_BODIES", "UNSUPPORTED_PARAMETER",
    }  # fmt: skip
    assert told == raised - elsewhere
