"""Who writes to a relay goes on, whether or not somebody reads."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.server import free_port
from services.common.process.relay import Relay
from tests.common.beating import LINES
from tests.common.test_watchdog import BEATING, PATIENCE_S

FILLING = b"."
GATEWAY = [sys.executable, "-m", "services.gateway", "port=0", "scheduler_addresses=127.0.0.1:1", "store_url=none"]


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    for file in (reading, writing):
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(file)


def fill(writing: int) -> None:
    """Nothing fits into it any more, for who writes as usual."""
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, FILLING * 65536)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, FILLING)
    os.set_blocking(writing, True)


def read(reading: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(reading, size - len(data))
    return data


def read_to(reading: int, words: bytes) -> bytes:
    """Until the end of the line with ``words``, without what filled the pipe."""
    data = b""
    while not (words in data and data.endswith(b"\n")):
        more = os.read(reading, 65536)
        assert more, data
        data += more
    return data.lstrip(FILLING)


def read_lines(reading: int, event: str) -> list[dict[str, Any]]:
    """Log lines up to the one about ``event``."""
    return list(map(json.loads, read_to(reading, event.encode()).splitlines()))


def test_all_of_it_comes_in_order(pipe):
    reading, writing = pipe
    relay = Relay(writing)
    lines = [b"line %d\n" % number for number in range(1000)]
    for line in lines:
        relay.write(line)
    assert read(reading, sum(map(len, lines))) == b"".join(lines)
    relay.drain()


@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_what_is_taken_at_once_is_there_when_a_write_returns(kind, pipe, tmp_path):
    """Were the process killed next, nothing would be lost."""
    sending, receiving = socket.socketpair()
    file = (tmp_path / "log").open("w+b")
    reading, writing = {
        "pipe": pipe,
        "socket": (receiving.fileno(), sending.fileno()),
        "file": (os.open(file.name, os.O_RDONLY), file.fileno()),
    }[kind]
    os.set_blocking(reading, False)
    relay = Relay(writing)
    for number in range(100):
        relay.write(b"%d\n" % number)
        assert os.read(reading, 100) == b"%d\n" % number
    sending.close()
    receiving.close()
    file.close()


@pytest.mark.parametrize("waits", [True, False])
def test_what_nobody_takes_is_dropped_and_counted(pipe, waits):
    """Whether writing to the pipe waits, or was made not to by who has it as well."""
    reading, writing = pipe
    relay = Relay(writing, most_bytes=1000)
    fill(writing)
    os.set_blocking(writing, waits)
    written = [b"%099d\n" % number for number in range(50)]
    for line in written:
        relay.write(line)
    relay.drain(0)
    *kept, note = read_to(reading, b"dropped").splitlines(keepends=True)
    assert kept == written[: len(kept)]
    assert 10 <= len(kept) < 50
    assert note == b"%d lines were dropped because the log consumer stalled\n" % (50 - len(kept))
    relay.write(b"on\n")
    assert read_to(reading, b"on") == b"on\n"


def test_how_much_was_dropped_is_said_on_a_line_of_its_own(pipe):
    """Also behind what is no whole line, such as a piece of a traceback."""
    reading, writing = pipe
    relay = Relay(writing, most_bytes=10)
    fill(writing)
    relay.write(b"a\n")
    while relay.buffered:  # until its thread is at work on that
        relay.drain(0)
    for piece in (b"b\n", b"piece", b" of a line\n"):
        relay.write(piece)
    assert read_to(reading, b"dropped").splitlines()[:3] == [
        b"a",
        b"b",
        b"piece",
    ]


def test_nobody_waits_for_a_reader_that_has_gone():
    reading, writing = os.pipe()
    relay = Relay(writing)
    os.close(reading)
    relay.write(b"x\n")
    relay.drain(30)
    relay.write(b"y\n")
    relay.drain(30)
    os.close(writing)


@contextlib.contextmanager
def started(command: list[str], stderr: int, stdout: int = subprocess.PIPE):
    with subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=Path(__file__).parents[2]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_gateway_answers_though_its_log_is_stuck(pipe, tmp_path):
    reading, writing = pipe
    fill(writing)
    command = [*GATEWAY, f"admin_port={(port := free_port())}", "log_level=debug", "failover_seconds=0"]
    with started(command, stderr=writing, stdout=writing) as gateway:
        url = f"http://127.0.0.1:{port}"
        wait_for_health(url, gateway)
        for _ in range(3):
            assert httpx.get(f"{url}/ready").status_code == 503
        gateway.send_signal(signal.SIGTERM)
        lines = read_lines(reading, "draining")
        assert gateway.wait(PATIENCE_S) == 0
    assert "listening" in (events := [line["event"] for line in lines])
    assert events[-1] == "draining"
    times = [line["timestamp"] for line in lines]
    assert times == sorted(times)


@pytest.mark.parametrize(("closed", "said"), [("1", b"last words"), ("2", b"serving")])
def test_a_service_runs_where_one_of_them_is_closed(pipe, closed, said):
    reading, writing = pipe
    command = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *BEATING]
    with started(command, stdout=writing, stderr=writing) as process:
        os.close(writing)
        assert said in read_to(reading, said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_service_ends_though_nobody_has_read_its_log(pipe):
    _, writing = pipe
    fill(writing)
    with started(BEATING, stderr=writing) as process:
        while process.stdout.readline() != b"serving\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_service_goes_on_though_more_is_said_than_can_wait(pipe):
    reading, writing = pipe
    fill(writing)
    with started([*BEATING, "manner=wordy"], stderr=writing) as process:
        while process.stdout.readline() != b"serving\n":  # all is said
            assert process.poll() is None
        lines = read_lines(reading, "dropped")
        [number] = [number for number, line in enumerate(lines) if "dropped" in line["event"]]
        kept, note = lines[:number], lines[number]
        assert [line["number"] for line in kept] == list(range(number))
        assert (note["service"], note["level"]) == ("beating", "warning")
        assert note["lines"] + number in (LINES, LINES + 1)  # with its last words
        assert number > 1000


@pytest.mark.parametrize(
    ("manner", "status", "last", "late"),
    [
        ("failing", 1, b"RuntimeError: of this it dies\n", True),
        ("refusing", 1, b'"event": "cannot continue"', True),
        ("aborting", -signal.SIGABRT, b"Fatal Python error: Aborted\n", False),
    ],
)
def test_the_last_lines_before_a_crash_are_there(pipe, manner, status, last, late):
    """Also where the reader comes ``late``, unless it is the interpreter that dies: nothing waits then."""
    reading, writing = pipe
    if late:
        fill(writing)
    with started([*BEATING, f"manner={manner}"], stderr=writing) as process:
        while process.stdout.readline() != b"serving\n":
            assert process.poll() is None, os.read(reading, 65536)
        said = read_to(reading, last.rstrip(b"\n"))
        assert process.wait(PATIENCE_S) == status
    assert said.index(b"last words") < said.index(last)


def wait_for_health(url: str, process: subprocess.Popen) -> None:
    while True:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
