"""A deployment that is started for one measurement, and helpers of all programs here."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from services.launcher.ports import is_free

START_TIMEOUT_S = 300.0
PORTS = range(16384, 32768, 16)  # of `free_port`; a program may also use some ports behind its own


@dataclass(frozen=True)
class Server:
    """A running ``toka``. ``base_url`` has no ``/v1``; ``grpc_address`` is that of its first scheduler."""

    base_url: str
    grpc_address: str
    process: subprocess.Popen
    output: BinaryIO

    @property
    def log(self) -> str:
        """Text that all processes of the server have written."""
        # Not by read(), which would move the position at which the processes write.
        number = self.output.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    @property
    def model(self) -> str:
        return httpx.get(f"{self.base_url}/v1/models", trust_env=False).json()["data"][0]["id"]

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels, from ``/metrics``."""
        lines = httpx.get(f"{self.base_url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@contextmanager
def serve(**flags: Any) -> Iterator[Server]:
    """Run ``toka`` with ``flags`` on free ports. Raises ``RuntimeError`` with its log if it does not start."""
    port, grpc_port = flags.pop("port", None) or free_port(), flags.pop("grpc_port", None) or free_port()
    arguments = [f"{name}={value}" for name, value in (flags | {"port": port, "grpc_port": grpc_port}).items()]
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "services.launcher.toka", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        server = Server(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", process, log)
        try:
            try:
                wait_until_ready(server.base_url, process)
            except RuntimeError as error:
                raise RuntimeError(f"{error}:\n{server.log[-4000:]}") from None
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def free_port() -> int:
    """Return a TCP port of this host that nothing listens on and that no other call returned lately.

    It lies below the ephemeral ports (`ip(7)`, from 32768): no outgoing connection can take it before its server
    listens. The calls of all processes take turns through one file, so tests in parallel get different ports.
    """
    turns = Path(tempfile.gettempdir()) / f"toka-ports-{os.getuid()}"
    with turns.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        turn = int(file.read() or 0)
        for number in range(turn, turn + len(PORTS)):
            port = PORTS[number % len(PORTS)]
            if is_free(port):
                file.truncate(0)
                file.write(str(number + 1))
                return port
    raise RuntimeError(f"every port from {PORTS[0]} to {PORTS[-1]} is taken")


def report(figures: dict[str, Any]) -> None:
    """Print ``figures`` as one JSON object, the last line of every program here."""
    print(json.dumps(figures))


def run_kept(
    name: str,
    directory: str | None,
    measure: Callable[[Path], dict[str, Any]],
    draw: Callable[[dict[str, Any]], None],
    is_right: Callable[[dict[str, Any]], bool],
) -> None:
    """Call ``measure`` with a directory for its files, and draw and report its figures.

    Exit with status 1 if ``is_right`` is false for the figures. Only then is the directory kept, unless it is given.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    path = Path(directory or tempfile.mkdtemp(prefix=f"toka-{name}-"))
    path.mkdir(parents=True, exist_ok=True)
    figures = measure(path)
    draw(figures)
    right = is_right(figures)
    if right and directory is None:
        shutil.rmtree(path)
    else:
        figures["directory"] = str(path)
    report(figures)
    if not right:
        raise SystemExit(1)


def wait_until_ready(base_url: str, process: subprocess.Popen) -> None:
    """Wait until the gateway at ``base_url`` is ready. Raises ``RuntimeError`` if ``process`` exits or is too slow."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{base_url}/ready", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    raise RuntimeError(f"{base_url} is not ready")
