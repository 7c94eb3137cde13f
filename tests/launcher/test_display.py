"""What a terminal shows while a deployment starts."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.config import DeploymentConfig
from services.common.flags import load
from services.common.process.progress import PROGRESS_FILE, READY, ProgressFile
from services.launcher.deployment import plan_children
from services.launcher.display import StartDisplay


@pytest.fixture
def shown(tmp_path):
    """A display of two workers: (display, files, what it wrote since the last look)."""
    files = {name: ProgressFile(tmp_path / name) for name in ("worker-0", "worker-1")}
    stream, now = io.BytesIO(), [1000.0]
    display = StartDisplay(files, stream, lambda: now[0])

    def look() -> list[str]:
        display.draw()
        text = stream.getvalue().decode()
        stream.seek(0)
        stream.truncate()
        return re.sub(r"\x1b\[\d*[AJ]|\r", "", text).split("\n")

    look.now, look.stream = now, stream
    return display, files, look


def test_each_worker_has_a_line_with_what_it_does_and_how_long_that_takes(shown):
    _, files, look = shown
    look.now[0] += 2
    assert look() == ["worker-0: starting ... 2 s", "worker-1: starting ... 2 s"]
    files["worker-0"].write("loading weights", 3.2)
    files["worker-1"].write("compiling the model", None)
    look.now[0] = files["worker-0"].read().since + 4
    assert look() == [
        "worker-0: loading weights (usually 3 s) ... 4 s",
        "worker-1: compiling the model (first start with these flags) ... 4 s",
    ]
    files["worker-0"].write("loading weights", 0.04)
    files["worker-1"].write(READY, None)
    first, second = look()
    assert first.startswith("worker-0: loading weights (usually less than 1 s)")
    assert second == "worker-1: ready"


def test_a_log_line_takes_the_place_of_the_lines_and_after_the_end_stands_alone(shown):
    display, files, look = shown
    display.draw()
    display.write(b"a log line\n")
    assert look.stream.getvalue().endswith(b"\r\x1b[1A\x1b[Ja log line\n")
    display.close()
    display.write(b"another\n")
    assert look.stream.getvalue().endswith(b"\x1b[Janother\n")
    assert not any(file.path.exists() for file in files.values())
    assert not files["worker-0"].write("loading weights", None)


def test_only_workers_report_to_it(tmp_path):
    children = plan_children(load(DeploymentConfig, ["dp_size=2", "gateways=1"], {}), tmp_path)
    _, reporting = StartDisplay.of(children, tmp_path)
    assert [child.name for child in reporting] == [child.name for child in children]
    assert {child.role for child in reporting if PROGRESS_FILE in child.environment} == {"worker"}
    assert len({child.environment.get(PROGRESS_FILE) for child in reporting}) == 3


@pytest.mark.slow
def test_a_terminal_shows_the_phases_and_the_log_on_it_does_not():
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "services.launcher", "device=cpu", "kv_cache_num_tokens=4096"]
    process = subprocess.Popen([*command, "port=0", "grpc_port=0"], stdout=subprocess.PIPE, stderr=its, text=True)
    os.close(its)
    try:
        text = b""
        while b"running every kind of step" not in text:
            text += os.read(ours, 65536)
        while b"scheduler ready" not in text:
            text += os.read(ours, 65536)
        assert any("Tokasaurus serves" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        while chunk := _read(ours):
            text += chunk
        assert process.wait() == 0
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    lines = text.decode()
    assert re.search(r"worker-0: running every kind of step \((usually|first start)", lines)
    assert not re.search(r"running every kind of step .*phase=", lines)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # no process has the other end any more
        return b""


def test_a_file_of_a_directory_that_is_gone_is_no_error():
    assert not ProgressFile(Path("/nowhere/worker-0")).write("loading weights", None)
    assert ProgressFile(Path("/nowhere/worker-0")).read() is None
