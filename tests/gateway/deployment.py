"""A whole deployment for tests: a real gateway and a real scheduler as processes, and a fake worker behind them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from openai import AsyncOpenAI, OpenAI

from bench.server import free_port
from services.common.process.service import PARENT_PID

PATIENCE_S = 60.0
BOOT_S = 100.0  # processes that begin on a busy machine


class Process:
    """A program of this repository, with its log in a file. ``within``: the command that runs it, if any."""

    def __init__(self, log: Path, module: str, *, within: Sequence[str] = (), **flags) -> None:
        self.log = log
        program = [sys.executable, "-m", module, *(f"{name}={value}" for name, value in flags.items())]
        self.command = [*within, *program]
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKA_")}
        environment[PARENT_PID] = str(os.getpid())
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The one that it ended with, negative for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once, stopped or not."""
        if self.running:
            self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it as an operator does."""
        if self.running:
            self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)  # services write to their logs where their threads are
            self._process.wait()
            raise AssertionError(f"{self.command} did not end:\n{self.log.read_text()[-8000:]}") from None


class Deployment:
    """One gateway, one scheduler, one fake worker (its flags in ``worker``; None: it is at ``worker_address``)."""

    def __init__(
        self,
        directory: Path,
        *,
        worker: dict | None = None,
        worker_address: str | None = None,
        scheduler: dict | None = None,
        gateway: dict | None = None,
        other_schedulers: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.scheduler_address = f"127.0.0.1:{free_port()}"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.worker = None
        if worker_address is None:
            worker_address = f"127.0.0.1:{free_port()}"
            self.worker = Process(directory / "worker.log", "tests.fakes.worker", listen=worker_address, **worker or {})
        self.scheduler = Process(
            directory / "scheduler.log",
            "services.scheduler",
            scheduler_listen=self.scheduler_address,
            worker_addresses=worker_address,
            **scheduler or {},
        )
        addresses = ",".join([self.scheduler_address, *other_schedulers])
        flags = {"port": port, "scheduler_addresses": addresses, "store_dir": directory / "store"} | (gateway or {})
        self.gateway = Process(directory / "gateway.log", "services.gateway", **flags)

    def stop(self) -> None:
        for process in (self.gateway, self.scheduler, self.worker):
            if process is not None:
                process.stop()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("*.log")))

    def status(self, path: str) -> int:
        """HTTP status of a GET; 0 while nothing listens."""
        try:
            return httpx.get(self.url + path, timeout=PATIENCE_S).status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> "Deployment":
        try:
            eventually(
                lambda: self.status("/ready") == 200 or not (self.scheduler.running and self.gateway.running), BOOT_S
            )
            assert self.status("/ready") == 200
        except AssertionError:
            ended = {"scheduler": self.scheduler.status, "gateway": self.gateway.status}
            self.stop()
            raise AssertionError(f"the deployment is not ready; exit statuses {ended}:\n{self.logs()}") from None
        return self

    def post(self, path: str, body) -> httpx.Response:
        """POST JSON, or bytes as they are."""
        headers = {"content-type": "application/json"}
        content = {"content": body, "headers": headers} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, timeout=PATIENCE_S, **content)

    def complete(self, **body) -> httpx.Response:
        return self.post("/v1/completions", body)

    def chat(self, **body) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | body)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(self.url + "/metrics", timeout=PATIENCE_S).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def sdk(self) -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def async_sdk(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def eventually(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait, within bounds, until ``condition`` holds."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.05)


def eventually_all(total: int, act: Callable[[], int], patience_s: float = PATIENCE_S) -> None:
    """Repeat ``act``, which returns how many more it has found, until it has found ``total``."""
    counts: list[int] = []

    def is_done() -> bool:
        counts.append(act())
        return sum(counts) == total

    eventually(is_done, patience_s)


async def eventually_async(condition: Callable[[], bool]) -> None:
    """``eventually`` that leaves the event loop to others; ``condition`` may block."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < give_up_at, "it did not happen in time"
        await asyncio.sleep(0.05)


def stop_and_wait(process: Process) -> int:
    """SIGTERM, and the exit status."""
    process.signal(signal.SIGTERM)
    return process.wait()
