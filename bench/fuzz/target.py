"""The target of fuzzing: a gateway, a scheduler and a worker, each a process that is not restarted."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.chaos.cluster import Cluster, cluster
from bench.chaos.config import ClusterConfig
from bench.fuzz.credentials import Credentials
from bench.fuzz.findings import Findings

_START_S = 120.0
_QUIET_S = 60.0
_EVERY_S = 0.2
# Small limits, so that random requests often reach them, and requests within them are cheap.
_FLAGS = (
    "max_choices=64", "max_output_tokens=32", "max_prompt_tokens=1000", "max_body_bytes=(1024 * 1024)",
    "slow_request_seconds=3", "max_samples_per_request=64", "max_queued_sequences=4096", "stats_report_seconds=0",
    "log_level=WARNING",
)  # fmt: skip
_SEQUENCES = ("toka_num_requests_running", "toka_num_requests_waiting")
UNFORESEEN = ("Traceback (most recent call last)", "violations:")


class Target:
    """The running services, made by ``target``."""

    def __init__(self, running: Cluster, credentials: Credentials) -> None:
        self._running, self.credentials = running, credentials
        self._pids = {name: process.pid for name, process in running.processes.items()}
        self.gateway_pid = next(pid for name, pid in self._pids.items() if name.startswith("gateway"))
        [self.url] = running.urls.values()
        self.scheduler = f"{running.network.host('scheduler-0')}:{running.network.ports['scheduler']}"

    def pid(self, name: str) -> int:
        """Return the process id of a service, such as gateway-0."""
        return self._pids[name]

    def get(self, path: str) -> httpx.Response:
        """Send a request to the gateway with an operator's key."""
        return httpx.get(self.url + path, headers=self.credentials.admin, timeout=30, trust_env=False)

    async def wait_ready(self) -> None:
        """Wait until the services are ready. Raises ``RuntimeError`` on failure."""
        try:
            async with asyncio.timeout(_START_S):
                while not await asyncio.to_thread(self._is_ready):  # noqa: ASYNC110 (there is no event to wait for)
                    await asyncio.sleep(_EVERY_S)
        except TimeoutError:
            raise RuntimeError(f"the services are not ready; logs are in {self._running.directory}") from None

    def ended(self) -> list[str]:
        """Return the services that have exited."""
        return [name for name, process in self._running.processes.items() if not process.running]

    async def look(self, findings: Findings) -> None:
        """Check at the end that all services run, that no sequences are left, and that no log has unexpected errors."""
        for name in self.ended():
            findings.add("services", -1, "crash", f"{name} ended with {self._running.processes[name].wait()}")
        if findings.kinds["services crash"]:
            return
        left = 1.0
        try:
            async with asyncio.timeout(_QUIET_S):
                while left := await asyncio.to_thread(self._sequences):  # noqa: ASYNC110 (there is no event to wait for)
                    await asyncio.sleep(_EVERY_S)
        except TimeoutError:
            findings.add("services", -1, "left running", f"{left} sequences without a client")

    def look_at_logs(self, findings: Findings) -> None:
        """Check the logs for unexpected errors. Call it after the services have ended."""
        for name in self._running.processes:
            log = (self._running.directory / f"{name}.log").read_text(errors="replace")
            for text in UNFORESEEN:
                if text in log:
                    findings.add("services", -1, "log", f"{name}: {text}", answer=log[-100_000:].encode())

    def _is_ready(self) -> bool:
        if self.ended():
            raise RuntimeError(f"{self.ended()} ended; logs are in {self._running.directory}")
        try:
            return self.get("/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _sequences(self) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] in _SEQUENCES)


@contextmanager
def target(directory: Path, *, keys: bool, flags: tuple[str, ...] = _FLAGS) -> Iterator[Target]:
    """Start the services, and yield them. Some may still be starting."""
    credentials = Credentials(directory if keys else None)
    config = ClusterConfig(worker="fake", gateways=1, replicas=1, netns="F", step_ms=0, flags=flags + credentials.flags)
    with cluster(config, directory) as (running, _):
        yield Target(running, credentials)
