"""What a log shows."""

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import structlog
from services.common.log import configure

def fail(prompt):
    raise ValueError("what is wrong")

configure("test", "INFO")
try:
    fail("what a client " + "has written")
except ValueError:
    structlog.get_logger("test").exception("request failed")
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_traceback_does_not_show_what_a_client_has_written(terminal):
    read, write = pty.openpty() if terminal else os.pipe()
    assert subprocess.run([sys.executable, "-c", PROGRAM], stderr=write, check=False).returncode == 0
    os.close(write)
    shown = b""
    try:
        while data := os.read(read, 65536):
            shown += data
    except OSError:  # a terminal that nobody has open any more
        pass
    os.close(read)
    assert b"ValueError: what is wrong" in shown
    assert b"what a client has written" not in shown
