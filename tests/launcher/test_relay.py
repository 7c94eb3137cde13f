"""Who writes to a relay goes on, whether or not somebody reads."""

import contextlib
import json
import os

import pytest

from services.launcher.relay import Relay


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)  # and whoever writes hears of it


def read(reading: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(reading, size - len(data))
    return data


def test_all_of_it_comes_in_order(pipe):
    reading, writing = pipe
    relay = Relay(writing)
    lines = [b"line %d\n" % number for number in range(1000)]
    for line in lines:
        relay.write(line)
    assert read(reading, sum(map(len, lines))) == b"".join(lines)
    relay.drain()


def test_what_nobody_takes_is_dropped_and_counted(pipe):
    reading, writing = pipe
    relay = Relay(writing, most_bytes=1000)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):  # until the pipe is full
        while True:
            os.write(writing, b"." * 65536)
    os.set_blocking(writing, True)
    written = [b"%099d\n" % number for number in range(50)]
    for line in written:
        relay.write(line)
    relay.drain(0)
    received = b""
    while b"dropped" not in received:
        received = (received + os.read(reading, 65536)).lstrip(b".")
    *kept, note = received.splitlines(keepends=True)
    assert kept == written[: len(kept)]
    assert 10 <= len(kept) < 50
    assert json.loads(note)["lines"] == 50 - len(kept)


def test_nobody_waits_for_a_reader_that_has_gone():
    reading, writing = os.pipe()
    relay = Relay(writing)
    os.close(reading)
    relay.write(b"x\n")
    relay.drain(30)
    relay.write(b"y\n")
    relay.drain(30)
    os.close(writing)
