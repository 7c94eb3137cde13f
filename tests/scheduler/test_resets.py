"""HTTP/2 streams that a client opens by the thousand without a call in mind."""

import contextlib
from pathlib import Path

import pytest

from bench.fuzz.http2 import MAX_CONCURRENT_STREAMS, acknowledge_settings, connect, open_streams
from bench.server import free_port
from tests.gateway.deployment import Process

GENERATE = "/tokasaurus.scheduler.v1.SchedulerService/Generate"
STREAMS, CONNECTIONS = 120_000, 8
MOST_BYTES = 800 * 1024 * 1024  # without bounds it is 1.2 GB, with them 0.5 GB


@pytest.fixture
def scheduler(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    process = Process(tmp_path / "log", "services.scheduler", scheduler_listen=address, worker_addresses="127.0.0.1:9")
    while "scheduler listening" not in process.log.read_text():
        assert process.running, process.log.read_text()
    yield process, address
    process.kill()


def resident_bytes(process):
    [line] = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


def test_a_connection_is_told_how_many_streams_it_may_open(scheduler):
    host, port = scheduler[1].split(":")
    with connect(host, int(port)) as connection:
        assert acknowledge_settings(connection)[MAX_CONCURRENT_STREAMS] == 16_384


@pytest.mark.parametrize("reset", [True, False], ids=["reset at once", "left open"])
def test_streams_without_a_message_take_bounded_memory(scheduler, reset):
    process, address = scheduler
    host, port = address.split(":")
    with contextlib.ExitStack() as connections:
        for _ in range(CONNECTIONS):
            connection = connections.enter_context(connect(host, int(port)))
            open_streams(connection, GENERATE, STREAMS // CONNECTIONS, reset=reset, seconds=30)
        assert resident_bytes(process) < MOST_BYTES
