"""Services that hang: frozen with SIGSTOP under ``toka``, they are found, killed and replaced, and answers go on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest

from bench.server import Server, serve
from tests.e2e.test_toka import child_running, complete, is_gone, wait_for

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(device="cpu", dtype="float32", step_deadline=3, store_url="none", gateways=2) as server:
        yield server


@contextmanager
def frozen(server: Server, service: str) -> Iterator[psutil.Process]:
    """A child, until it is dead. It serves again behind that."""
    victim = child_running(server.process.pid, f"services.{service}")
    victim.suspend()
    try:
        yield victim
        wait_for(lambda: is_gone(victim.pid))
    finally:
        if not is_gone(victim.pid):
            victim.resume()
    wait_for(lambda: ready(server)[0] == 200)


def ready(server: Server) -> tuple[int, str]:
    """Status of ``/ready``, and the first replica's reason; 0 when there is no answer."""
    try:
        answer = httpx.get(f"{server.base_url}/ready", timeout=5)
    except httpx.TransportError:
        return 0, ""
    return answer.status_code, answer.json()["replicas"][0]["reason"] or ""


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_answers_outlive_a_frozen(server, service):
    expected = complete(server, **LONG).choices[0].text
    stream = complete(server, stream=True, **LONG)
    text = next(stream).choices[0].text
    with frozen(server, service), ThreadPoolExecutor() as threads:
        rest = threads.submit(lambda: "".join(chunk.choices[0].text for chunk in stream))
        wait_for(lambda: ready(server)[1])  # says why
        assert text + rest.result() == expected


def test_one_of_several_gateways_is_replaced_and_the_others_go_on(server):
    with frozen(server, "gateway"):
        wait_for(lambda: answers(server))


def answers(server: Server) -> bool:
    """On a connection of its own, which may fall to either gateway."""
    try:
        return bool(complete(server).choices[0].text)
    except (openai.APIConnectionError, httpx.TransportError):
        return False
