"""Ordinary starts and stops log no warning and write nothing beside the log."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.quick import quick_if

QUESTION = "Question: Tom has 3 bags with 4 apples each. How many apples does Tom have?\nAnswer:"
SMALL = ("device=cpu", "kv_cache_num_tokens=4096", "log_format=json")


def start(module: str, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", module, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def toka(*flags: str) -> subprocess.Popen:
    return start("services.launcher", *SMALL, "port=0", "grpc_port=0", *flags)


def events(process: subprocess.Popen) -> Iterator[dict]:
    """Each line of its log. Raises ``ValueError`` for one that is no log line."""
    return map(json.loads, process.stderr)


def wait_for(process: subprocess.Popen, event: str) -> list[dict]:
    """The log until ``event``."""
    found = []
    for line in events(process):
        found.append(line)
        if line["event"] == event:
            return found
    raise AssertionError(f"{event!r} was never logged: {found}")


def end(process: subprocess.Popen, number: signal.Signals) -> list[dict]:
    """The rest of the log, of a process that ends well."""
    process.send_signal(number)
    rest = list(events(process))
    process.communicate()
    assert process.returncode == 0
    return rest


def unusual(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["level"] not in ("debug", "info")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ((), signal.SIGINT),
        (("dp_size=2", "gateways=2", "store_url=none"), signal.SIGTERM),
    ],
)
def test_a_start_a_request_and_a_stop_log_no_warning(flags, number):
    process = toka(*flags)
    try:
        banner = next(line for line in process.stdout if "Tokasaurus serves" in line)
        url = banner.split(" on ")[1].split()[0]
        body = {"model": "tokasaurus-builtin", "prompt": QUESTION, "max_tokens": 20, "n": 4}
        assert len(httpx.post(f"{url}/completions", json=body, timeout=60).json()["choices"]) == 4
        lines = end(process, number)
    finally:
        process.kill()
    assert {"weights loaded", "worker connected", "scheduler ready", "draining"} <= {line["event"] for line in lines}
    assert unusual(lines) == []


@pytest.mark.slow
@pytest.mark.parametrize("event", ["loading libraries", "running every kind of step"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_model_loads_logs_no_warning(event, number):
    process = toka("dp_size=2")
    try:
        lines = wait_for(process, event) + end(process, number)
    finally:
        process.kill()
    assert unusual(lines) == []


@pytest.mark.parametrize(
    "event",
    quick_if(
        lambda event: event == "loading libraries",
        ["loading libraries", "weights loaded", "running every kind of step"],
    ),
)
def test_a_worker_that_loads_ends_at_once_and_quietly(event):
    """The interpreter would end in an abort beside the thread that loads."""
    process = start("services.worker", *SMALL, "worker_listen=127.0.0.1:0", "drain_seconds=1000")
    try:
        lines = wait_for(process, event) + end(process, signal.SIGTERM)
    finally:
        process.kill()
    assert unusual(lines) == []
    assert "model ready" not in {line["event"] for line in lines}


def test_ctrl_c_before_toka_is_loaded_ends_it_without_a_traceback():
    code = (
        "import os, signal, sys, types\n"
        "loaded = sys.modules['services.launcher.toka'] = types.ModuleType('toka')\n"
        "loaded.main = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "from services.launcher.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
