"""Services whose clients hold more connections than they may open files."""

import contextlib
import socket
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.fuzz.http2 import connect
from bench.server import free_port
from tests.gateway.deployment import PATIENCE_S, Process

FILES = 80
CONNECTIONS = 180
LIMITED = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
SHORT = "file descriptors are short"


@contextlib.contextmanager
def running(log: Path, module, until, **flags):
    process = Process(log, module, within=LIMITED, **flags)
    try:
        while not until():
            assert process.running, log.read_text()
        yield
    finally:
        process.stop()


@pytest.fixture
def ports():
    return free_port(), free_port()


def health(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status_code
    except httpx.TransportError:
        return 0


def test_a_gateway_outlives_more_idle_connections_than_it_may_open(tmp_path, ports):
    port, admin_port = ports
    flags = {"port": port, "admin_port": admin_port, "store_dir": tmp_path / "store", "keep_alive_seconds": 3600}
    log = tmp_path / "log"
    with running(log, "services.gateway", lambda: health(port), scheduler_addresses="127.0.0.1:9", **flags):
        with contextlib.ExitStack() as clients:
            for _ in range(CONNECTIONS):
                clients.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            assert health(admin_port) == 200
            assert health(port) in (200, 503)
        while health(port) != 200:
            pass
    told = log.read_text()
    assert "Traceback" not in told
    assert told.count(SHORT) <= 1


def test_a_scheduler_outlives_more_idle_connections_than_it_may_open(tmp_path, ports):
    port, metrics_port = ports
    log = tmp_path / "log"

    def answers():
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            except grpc.RpcError:
                return False
            return True

    flags = {"scheduler_listen": f"127.0.0.1:{port}", "metrics_port": metrics_port, "worker_addresses": "127.0.0.1:9"}
    with running(log, "services.scheduler", answers, **flags):
        with contextlib.ExitStack() as clients:
            for _ in range(CONNECTIONS):
                clients.enter_context(connect("127.0.0.1", port))
            metrics = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=PATIENCE_S)
            assert metrics.status_code == 200
        while not answers():
            pass
    assert "Traceback" not in log.read_text()
