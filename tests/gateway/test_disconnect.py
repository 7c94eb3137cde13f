"""A client that goes away frees what its request held."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.gateway.deployment import Deployment, eventually

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Steps of 5 ms: an answer of 2,000 tokens takes long enough to leave in its middle."""
    running = Deployment(tmp_path_factory.mktemp("slow"), worker={"step_ms": 5}).wait_ready()
    yield running
    running.stop()


def send(deployment, **body) -> socket.socket:
    parts = urlsplit(deployment.url)
    connection = socket.create_connection((parts.hostname, parts.port))
    content = json.dumps(body).encode()
    connection.sendall(HEAD % len(content) + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_pages(slow, stream):
    cancelled = slow.metric("toka_sequences_cancelled_total")
    with send(slow, prompt=[20] * 100, n=8, max_tokens=1900, stream=stream) as connection:
        if stream:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        eventually(lambda: slow.metric("toka_kv_pages_in_use") > 0)
    eventually(lambda: slow.metric("toka_kv_pages_in_use") == 0)
    assert slow.metric("toka_num_requests_running") == 0
    assert slow.metric("toka_sequences_cancelled_total") == cancelled + 8
    assert slow.complete(prompt="x", max_tokens=2).status_code == 200


def test_a_client_that_disconnects_ends_the_request_that_runs_before_others_on_its_connection(slow):
    cancelled = slow.metric("toka_sequences_cancelled_total")
    with send(slow, prompt=[23] * 100, n=8, max_tokens=1900, stream=True) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        content = json.dumps({"prompt": [24], "max_tokens": 2}).encode()
        connection.sendall(HEAD % len(content) + content)
    eventually(lambda: slow.metric("toka_sequences_cancelled_total") == cancelled + 8)


def test_a_client_that_leaves_while_it_waits_in_the_queue(slow):
    with send(slow, prompt=[21] * 10, n=256, max_tokens=1900) as running:
        eventually(lambda: slow.metric("toka_num_requests_running") > 0)
        with send(slow, prompt=[22] * 10, n=300, max_tokens=1900):
            eventually(lambda: slow.metric("toka_num_requests_waiting") >= 300)
        eventually(lambda: slow.metric("toka_num_requests_waiting") < 300)
        running.close()
    eventually(lambda: slow.metric("toka_kv_pages_in_use") == 0)
    eventually(lambda: slow.metric("toka_num_requests_waiting") == 0)


def test_a_client_that_leaves_in_the_middle_of_its_body(slow):
    parts = urlsplit(slow.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(HEAD % 1000 + b'{"prompt":')
    eventually(lambda: slow.metric("toka_http_disconnects_total") > 0)
    assert slow.complete(prompt="x", max_tokens=2).status_code == 200
