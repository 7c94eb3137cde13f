"""A deployment as an orchestrator runs it: each service is a process that is restarted when it exits."""

import asyncio
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.config import ClusterConfig
from bench.chaos.network import OUTSIDE, Link, Network, network
from bench.chaos.schedule import all_links
from services.common.addresses import is_public
from services.common.config import GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.flags import FlagError
from tests.gateway.deployment import Process

_LOOK_S = 0.05
_RESTART_S = 0.5  # delay of a restart
_START_S = 300.0
_ANSWER_S = 5.0
_ENDS_ALLOWED = 3  # exits of services during the start
_MODULES = {"gateway": "services.gateway", "scheduler": "services.scheduler", "worker": "services.worker"}
_FAKE_WORKER = "tests.fakes.worker"
# The shape of fake workers.
FAKE_SIZES = {"page_count": 4096, "max_tokens_per_step": 2048, "max_slots": 512, "eos_every": 60}
_CONFIGS = {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}


class Cluster:
    """The processes of a deployment, made by ``cluster``. Used on the program's event loop."""

    def __init__(self, config: ClusterConfig, directory: Path, wires: Network, names: dict[str, list[str]]) -> None:
        self.names = names  # by role
        self.directory = directory
        self.network = wires
        self.crashes: Counter[str] = Counter()  # unexpected exits by service and exit status
        self._due: dict[str, float] = {}  # times until which an exit of a service is expected
        self._kept = True
        flags = _service_flags(config)
        self.processes = {
            name: Process(
                directory / f"{name}.log",
                _FAKE_WORKER if role == "worker" and config.worker == "fake" else _MODULES[role],
                within=wires.within(name),
                **self._own_flags(config, role, number),
                **({} if role == "worker" and config.worker == "fake" else flags[role]),
            )
            for role in ("worker", "scheduler", "gateway")
            for number, name in enumerate(names[role])
        }

    @property
    def urls(self) -> dict[str, str]:
        """URLs of the gateways for this program, by name."""
        port = self.network.ports["gateway"]
        return {name: f"http://{self.network.reach(name, OUTSIDE)}:{port}" for name in self.names["gateway"]}

    def pids(self, role: str) -> list[int]:
        return [self.processes[name].pid for name in self.names[role]]

    def expect_end(self, name: str, seconds: float = 60.0) -> None:
        """Do not count an exit of ``name`` within ``seconds`` as a crash."""
        self._due[name] = time.monotonic() + seconds

    async def keep(self) -> None:
        """Restart exited services, for ever."""
        ended: dict[str, float] = {}
        while True:
            now = time.monotonic()
            for name, process in self.processes.items():
                if process.running:
                    continue
                if name not in ended:
                    ended[name] = now
                    if self._due.pop(name, 0) < now:
                        self.crashes[f"{name} {process.wait()}"] += 1
                elif now >= ended[name] + _RESTART_S:
                    process.start()
                    del ended[name]
            await asyncio.sleep(_LOOK_S)

    async def wait_ready(self) -> None:
        """Wait until every gateway is connected to every replica. Raises ``RuntimeError`` on failure."""
        ends = self.crashes.total()

        async def all_have_all() -> bool:
            if self.crashes.total() > ends + _ENDS_ALLOWED:
                raise RuntimeError(f"services exit unexpectedly: {dict(self.crashes)}; logs are in {self.directory}")
            return all([await self._has_all(name) for name in self.names["gateway"]])

        try:
            async with asyncio.timeout(_START_S):
                await _until(all_have_all)
        except TimeoutError:
            raise RuntimeError(f"a gateway is not connected to all replicas; logs are in {self.directory}") from None

    async def runs(self, name: str) -> None:
        """Wait until the process ``name`` runs."""

        async def running() -> bool:
            return self.processes[name].running

        await _until(running)

    async def answers(self, gateway: str) -> None:
        """Wait until ``gateway`` answers."""

        async def answered() -> bool:
            return await self.get(gateway, "/health") is not None

        await _until(answered)

    async def _has_all(self, gateway: str) -> bool:
        answer = await self.get(gateway, "/ready")
        return answer is not None and all(replica["ready"] for replica in answer.json()["replicas"])

    async def get(self, gateway: str, path: str) -> httpx.Response | None:
        """Return the response of ``gateway``, or None if it does not answer."""
        if not self.processes[gateway].running:
            return None
        try:
            # Without TLS. Loading certificate authorities each time would block the event loop.
            async with httpx.AsyncClient(trust_env=False, timeout=_ANSWER_S, verify=False) as http:
                return await http.get(self.urls[gateway] + path)
        except httpx.TransportError:
            return None

    def stop(self) -> None:
        for process in self.processes.values():
            if process.running:
                process.signal(signal.SIGCONT)
        for role in ("gateway", "scheduler", "worker"):
            for name in self.names[role]:
                try:
                    self.processes[name].stop()
                except subprocess.TimeoutExpired:  # the process was killed
                    self.crashes[f"{name} did not end"] += 1

    def violations(self) -> list[str]:
        """Return the log lines of fake workers about plans that broke the contract."""
        logs = ((name, self.directory / f"{name}.log") for name in self.names["worker"])
        return [
            f"{name}: {line}"
            for name, log in logs
            for line in log.read_text(errors="replace").splitlines()
            if line.startswith("violations:")
        ]

    def _own_flags(self, config: ClusterConfig, role: str, number: int) -> dict[str, Any]:
        name, ports = self.names[role][number], self.network.ports
        listen = f"{self.network.host(name)}:{ports[role]}"
        if role == "gateway":
            hosts = [self.network.reach(scheduler, name) for scheduler in self.names["scheduler"]]
            schedulers = [f"{host}:{ports['scheduler']}" for host in hosts]
            flags = {"host": self.network.host(name), "port": ports["gateway"]}
            store = self.directory / "store"
            url = f"sqlite:///{self.directory}/store.db"
            return flags | {"scheduler_addresses": ",".join(schedulers), "store_dir": store, "store_url": url}
        if role == "scheduler":
            worker = f"{self.network.reach(self.names['worker'][number], name)}:{ports['worker']}"
            return {"scheduler_listen": listen, "worker_addresses": worker}
        if config.worker == "fake":
            return {"listen": listen, "step_ms": config.step_ms, **FAKE_SIZES}
        # Answers are compared: in float32, other rows of a batch do not change an answer.
        # Steps are short, so that none exceeds a step_deadline of some seconds even on a busy machine.
        sizes = {"dtype": "float32", "kv_cache_num_tokens": 64 * 1024, "max_seqs_per_forward": 512,
                 "max_tokens_per_forward": 512}  # fmt: skip
        # Namespaces are a private network, which needs no TLS.
        sizes |= {"insecure_worker": "T"} if is_public(listen) else {}
        return {"worker_listen": listen, "device": "cpu", "torch_num_threads": 1, "dp_rank": number, **sizes}


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await holds():
            return
        await asyncio.sleep(_LOOK_S)


def _service_flags(config: ClusterConfig) -> dict[str, dict[str, str]]:
    """Return the part of ``flags`` that each role has."""
    given = dict(flag.partition("=")[::2] for flag in config.flags)
    for name in given:
        if not any(name in kind.model_fields for kind in _CONFIGS.values()):
            raise FlagError(f"flag flags={name}=...: no service has a flag {name}")
    return {
        role: {name: value for name, value in given.items() if name in kind.model_fields}
        for role, kind in _CONFIGS.items()
    }


@contextmanager
def cluster(config: ClusterConfig, directory: Path) -> Iterator[tuple[Cluster, list[Link]]]:
    """Start the services, and yield them with the links between them. Some may still be starting."""
    names = {
        "gateway": [f"gateway-{number}" for number in range(config.gateways)],
        "scheduler": [f"scheduler-{number}" for number in range(config.replicas)],
        "worker": [f"worker-{number}" for number in range(config.replicas)],
    }
    links = all_links(names["gateway"], names["scheduler"], names["worker"])
    everybody = [name for role in names.values() for name in role]
    with network(everybody, links, config.netns) as wires:
        running = Cluster(config, directory, wires, names)
        try:
            yield running, links
        finally:
            running.stop()
