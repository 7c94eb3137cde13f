"""What a log shows."""

import json
import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import structlog
from services.common.process.log import configure

def fail(prompt):
    raise ValueError("what is wrong")

configure("test", "INFO", *sys.argv[1:])
structlog.contextvars.bind_contextvars(request_id="cmpl-1")
try:
    fail("what a client " + "has written")
except ValueError:
    structlog.get_logger("test").exception("request failed")
"""


def shown(*arguments: str, terminal: bool, **environment: str) -> bytes:
    """What the program writes to its stderr."""
    read, write = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", PROGRAM, *arguments]
    plain = {name: value for name, value in os.environ.items() if not name.endswith("_COLOR")}
    assert subprocess.run(command, stderr=write, env=plain | environment, check=False).returncode == 0
    os.close(write)
    shown = b""
    try:
        while data := os.read(read, 65536):
            shown += data
    except OSError:  # a terminal that nobody has open any more
        pass
    os.close(read)
    return shown


@pytest.mark.parametrize("terminal", [False, True])
def test_a_traceback_does_not_show_what_a_client_has_written(terminal):
    text = shown(terminal=terminal)
    assert b"ValueError: what is wrong" in text
    assert b"what a client has written" not in text
    assert (b"\x1b[" in text) == terminal


@pytest.mark.parametrize(
    ("log_format", "terminal", "environment", "coloured"),
    [
        ("console", False, {}, False),
        ("console", False, {"FORCE_COLOR": "1"}, True),
        ("auto", True, {"NO_COLOR": "1"}, False),
    ],
)
def test_lines_for_people_have_colours_where_these_are_seen(log_format, terminal, environment, coloured):
    text = shown(log_format, terminal=terminal, **environment)
    assert b"request failed" in text
    assert not text.startswith(b"{")
    assert (b"\x1b[" in text) == coloured


def test_lines_for_programs_say_whose_request_it_is():
    [line] = shown("json", terminal=True).splitlines()
    assert json.loads(line).items() >= {
        ("request_id", "cmpl-1"),
        ("service", "test"),
        ("level", "error"),
        ("event", "request failed"),
    }
