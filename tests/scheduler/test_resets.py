"""HTTP/2 streams that a client opens by the thousand without a call in mind."""

import contextlib
import platform
from itertools import pairwise
from pathlib import Path

import pytest

from bench.fuzz.http2 import MAX_CONCURRENT_STREAMS, acknowledge_settings, connect, open_streams
from bench.server import free_port
from tests.gateway.deployment import Process

GENERATE = "/tokasaurus.scheduler.v1.SchedulerService/Generate"
STREAMS, CONNECTIONS = 120_000, 8
ARENA_BYTES = 64 * 1024 * 1024
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are a part of glibc")
def test_threads_share_one_arena(scheduler):
    """With several arenas, a burst of resets takes 740 MiB instead of 430, since freed memory stays in each of them."""
    mappings = [line.split() for line in Path(f"/proc/{scheduler[0].pid}/maps").read_text().splitlines()]
    anonymous = [[int(end, 16) for end in each[0].split("-")] for each in mappings if len(each) == 5]
    # An arena beside the main one begins at a multiple of 64 MiB: memory in use, then the rest of its 64 MiB reserved.
    arenas = [
        used
        for used, rest in pairwise(anonymous)
        if used[0] % ARENA_BYTES == 0 and used[1] == rest[0] and rest[1] == used[0] + ARENA_BYTES
    ]
    assert not arenas


@pytest.mark.parametrize(
    "reset", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["reset at once", "left open"]
)
def test_streams_without_a_message_take_bounded_memory(scheduler, reset):
    process, address = scheduler
    host, port = address.split(":")
    with contextlib.ExitStack() as connections:
        for _ in range(CONNECTIONS):
            connection = connections.enter_context(connect(host, int(port)))
            open_streams(connection, GENERATE, STREAMS // CONNECTIONS, reset=reset, seconds=30)
        assert resident_bytes(process) < MOST_BYTES
