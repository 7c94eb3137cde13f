"""Several gateway processes on one port, as their user sees them: real processes, asked, killed and stopped."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from bench.server import Server, free_port, serve
from tests.e2e.test_toka import is_gone, run_toka, wait_for

pytestmark = pytest.mark.slow

GATEWAYS = 2
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
COMPLETIONS = 'toka_http_requests_total{route="/v1/completions",status="200"}'
CLIENTS = 32  # connections; that all of them meet the same gateway has a chance of 1 to 2 billion


@pytest.fixture(scope="module")
def server():
    with serve(device="cpu", dtype="float32", gateways=GATEWAYS) as server:
        yield server


def gateways_of(server: Server) -> list[psutil.Process]:
    """Those that run now."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if not is_gone(child.pid) and "services.gateway" in child.cmdline()]


def ask(server: Server, **settings) -> httpx.Response:
    """One completion over a connection of its own."""
    body = {"model": "tokasaurus-builtin", "prompt": "Question: What is 2+3?\nAnswer:", "max_tokens": 4} | settings
    return httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60, trust_env=False)


def metrics(server: Server) -> dict[str, float]:
    """All of them by name and labels, but for those about processes, for what is counted by asking, and for what a
    step loop that waits counts, too: each gateway has heard of it at another time."""
    lines = httpx.get(f"{server.base_url}/metrics", timeout=60, trust_env=False).text.splitlines()
    samples = dict(
        line.rsplit(" ", 1)
        for line in lines
        if line.startswith("toka_") and '"/metrics"' not in line and not line.startswith("toka_step_loop_seconds")
    )
    return {name: float(value) for name, value in samples.items()}


def ask_many(server: Server) -> list[int]:
    """The statuses of as many completions as there are clients, all at once."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda number: ask(server, seed=number).status_code, range(CLIENTS)))


class Stream:
    """A stream that was begun, on a connection of its own."""

    def __init__(self, server: Server, tokens: int) -> None:
        address = urlsplit(server.base_url)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=60)
        self.port = self._socket.getsockname()[1]
        body = json.dumps(
            {"model": "tokasaurus-builtin", "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        )
        head = HEAD % len(body)
        self._socket.sendall((head + body).encode())
        self._received = b""
        while b"data: " not in self._received:
            self._received += self._socket.recv(65536)

    def finish(self) -> bool:
        """Read it to its end; whether that was the end of the answer."""
        with self._socket:
            while b"data: [DONE]" not in self._received:
                try:
                    received = self._socket.recv(65536)
                except ConnectionResetError:
                    return False
                if not received:
                    return False
                self._received += received
        return True


def ports_served_by(gateway: psutil.Process) -> set[int]:
    """The clients' ports of its connections."""
    return {connection.raddr.port for connection in gateway.net_connections("tcp") if connection.raddr}


def test_all_of_them_serve_and_whichever_is_asked_for_metrics_answers_for_all(server):
    port = urlsplit(server.base_url).port
    clients = [httpx.Client(base_url=server.base_url, timeout=60, trust_env=False) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = list(pool.map(lambda client: client.get("/v1/models").status_code, clients))
    assert statuses == [200] * CLIENTS
    served = [
        sum(
            connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
            for connection in gateway.net_connections("tcp")
        )
        for gateway in gateways_of(server)
    ]
    assert len(served) == GATEWAYS
    assert all(served)
    assert sum(served) == CLIENTS
    for client in clients:
        client.close()

    finished = f'toka_sequences_finished_total{{replica="{server.grpc_address}"}}'
    wait_for(lambda: all(finished in metrics(server) for _ in range(16)))  # each has heard of its scheduler's load
    before = metrics(server)
    assert ask_many(server) == [200] * CLIENTS
    of_requests = (COMPLETIONS, "toka_e2e_request_latency_seconds_count", "toka_request_generation_tokens_count")
    for scrape in [metrics(server) for _ in range(16)]:
        assert [scrape[name] for name in of_requests] == [before.get(name, 0) + CLIENTS for name in of_requests]
    wait_for(lambda: {metrics(server)[finished] for _ in range(16)} == {before[finished] + CLIENTS})
    wait_for(lambda: len({frozenset(metrics(server).items()) for _ in range(16)}) == 1)


def test_a_killed_gateway_takes_its_own_connections_with_it_and_nothing_else(server):
    before = metrics(server).get(COMPLETIONS, 0)
    victim, survivor = gateways_of(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        streams = list(pool.map(lambda _: Stream(server, tokens=600), range(CLIENTS)))
    lost, kept = ports_served_by(victim), ports_served_by(survivor)
    victim.kill()
    wait_for(lambda: is_gone(victim.pid))
    # Half of these wait in the queue of a process that is no longer there.
    assert ask_many(server) == [200] * CLIENTS

    finished = {stream.port: stream.finish() for stream in streams}
    assert {port for port, whole in finished.items() if whole} == kept & set(finished)
    assert {port for port, whole in finished.items() if not whole} == lost & set(finished)
    assert kept & set(finished)
    assert lost & set(finished)

    now = gateways_of(server)
    assert len(now) == GATEWAYS
    assert survivor in now
    assert victim not in now
    assert {metrics(server)[COMPLETIONS] for _ in range(16)} == {before + 2 * CLIENTS}


class Unsent:
    """A request whose body has not come yet: a gateway that ends waits for it."""

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.base_url)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=60)
        self.port = self._socket.getsockname()[1]
        self._body = json.dumps({"model": "tokasaurus-builtin", "prompt": "x", "max_tokens": 2}).encode()
        head = HEAD % len(self._body)
        self._socket.sendall(head.encode())

    def finish(self) -> bytes:
        """The first line of the answer."""
        with self._socket:
            self._socket.sendall(self._body)
            return self._socket.recv(65536).partition(b"\r\n")[0]


def listens(gateway: psutil.Process) -> bool:
    return any(connection.status == psutil.CONN_LISTEN for connection in gateway.net_connections("tcp"))


def takes_some(server: Server, gateway: psutil.Process) -> bool:
    """Return whether the gateway gets one of several new connections."""
    unsent = [Unsent(server) for _ in range(CLIENTS)]
    taken = ports_served_by(gateway) & {each.port for each in unsent}
    assert {each.finish() for each in unsent} == {b"HTTP/1.1 200 OK"}
    return bool(taken)


def test_new_connections_get_to_others_while_one_drains(server):
    # The successor of a gateway that another test killed may not listen yet.
    wait_for(lambda: all(takes_some(server, gateway) for gateway in gateways_of(server)))
    unsent = [Unsent(server) for _ in range(CLIENTS)]
    leaving, staying = gateways_of(server)
    wait_for(lambda: len(ports_served_by(leaving) & {each.port for each in unsent}) > 0)
    leaving.send_signal(signal.SIGTERM)
    wait_for(lambda: not listens(leaving))
    statuses, waited = ask_many(server), not is_gone(leaving.pid)
    assert {each.finish() for each in unsent} == {b"HTTP/1.1 200 OK"}
    assert statuses == [200] * CLIENTS
    assert waited  # for its clients
    wait_for(lambda: is_gone(leaving.pid) and len(gateways_of(server)) == GATEWAYS)
    [successor] = [gateway for gateway in gateways_of(server) if gateway != staying]
    wait_for(lambda: takes_some(server, successor))


def test_a_signal_ends_all_of_them(server):
    """The last test of them."""
    pids = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
    assert len(gateways_of(server)) == GATEWAYS
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=60) == 0
    assert all(is_gone(pid) for pid in pids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.base_url}/health", trust_env=False)


def test_a_port_in_use_is_explained(builtin_server):
    port = urlsplit(builtin_server.base_url).port
    outcome = run_toka(f"port={port}", f"grpc_port={free_port()}", "gateways=2")
    assert outcome.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in outcome.stderr


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("gateways=-1", "flag gateways='-1': expected 0 to 64, or auto"),
        ("gateways=65", "flag gateways='65': expected 0 to 64, or auto"),
        ("gateways=all", "flag gateways='all': expected a whole number, or auto"),
        ("gateway=2", "unknown flag 'gateway' in 'gateway=2': did you mean gateways=?"),
    ],
)
def test_a_wrong_number_is_explained(flag, sentence):
    outcome = run_toka(flag)
    assert outcome.returncode == 2
    assert sentence in outcome.stderr


def test_a_gateway_by_itself_is_one_process():
    command = [sys.executable, "-m", "services.gateway", "gateways=2"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 2
    assert "unknown flag 'gateways'" in outcome.stderr


def test_the_capacity_of_several_is_measured():
    flags = ("gateways=2", "prompt_tokens=8", "requests=16", "max_tokens=2", "sequences=16")
    command = [sys.executable, "-m", "bench.gateway_capacity", *flags]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])
    assert figures["failures"] == 0
    assert len(figures["requests_by_gateway"]) == 2
    assert sum(figures["requests_by_gateway"]) == 16
