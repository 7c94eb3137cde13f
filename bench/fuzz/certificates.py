"""The gRPC ports of replicas with mutual TLS, and clients with right and wrong certificates.

What each client may do is in SECURITY.md, "Access to gRPC, and links between the programs".
"""

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from bench.fuzz.canary import random_of
from bench.fuzz.config import FuzzConfig
from bench.fuzz.findings import Findings, Wrong
from bench.fuzz.target import UNFORESEEN
from bench.server import free_port
from tests.common.rpc.authority import Authority, Pair, flags
from tests.gateway.deployment import Process
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2
from tokasaurus.worker.v1 import worker_pb2

# The kinds of address of the worker and of the scheduler, for each replica.
EACH_KIND = (("tcp", "unix"), ("unix", "tcp"))
_START_S = 300.0
_RETRY_S = 0.2
_SCHEDULER, _WORKER = "/tokasaurus.scheduler.v1.SchedulerService/", "/tokasaurus.worker.v1.WorkerService/"
_CHECK = "/grpc.health.v1.Health/Check"
_SIZES = {
    "kv_cache_num_tokens": 2048, "max_seqs_per_forward": 8, "max_tokens_per_forward": 64, "torch_num_threads": 1,
    "device": "cpu", "dtype": "float32",
}  # fmt: skip
# Calls of a client whose certificate is accepted: each succeeds.
_CALLS: dict[str, dict[str, tuple[Message, type[Message]]]] = {
    "scheduler": {
        _CHECK: (health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse),
        f"{_SCHEDULER}GetModel": (observe_pb2.GetModelRequest(), observe_pb2.GetModelResponse),
        f"{_SCHEDULER}Generate": (
            generate_pb2.GenerateRequest(text="a", stopping=generate_pb2.Stopping(max_tokens=2)),
            generate_pb2.GenerateResponse,
        ),
    },
    "worker": {
        _CHECK: (health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse),
        f"{_WORKER}GetWorkerInfo": (worker_pb2.GetWorkerInfoRequest(), worker_pb2.GetWorkerInfoResponse),
    },
}
PLAINTEXT = "no TLS"
# The line of gRPC about a failed handshake. The log must not have it, because any client could cause it repeatedly.
_LOGGED = ("ssl_transport_security", *UNFORESEEN)
# Certificates have no roles and no names that servers check.
ACCEPTED = {"tcp": frozenset({"right", "of another name"}), "unix": frozenset({PLAINTEXT})}


class Clients:
    """The credentials of all kinds of clients, and the certificate of the servers."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.server = self.authority.issue("server")
        stranger = Authority(directory, "stranger")
        issue = self.authority.issue
        shown: dict[str, Pair | None] = {
            "no certificate": None,
            "self-signed": stranger.own(),
            "of another authority": stranger.issue("stranger-client"),
            "of a certificate that is no authority": issue("of-leaf", through=issue("leaf")),
            "expired": issue("expired", expired=True),
            "not yet valid": issue("early", early=True),
            "for servers only": issue("server-only", for_servers_only=True),
            "of another name": issue("other", host="other.example"),
            "right": issue("right"),
        }
        self._credentials = {name: _credentials(self.authority, pair) for name, pair in shown.items()}
        self.names = (PLAINTEXT, *shown)

    def open(self, name: str, address: str) -> grpc.aio.Channel:
        """Return a channel with the credentials ``name``. It shares no connection with another one."""
        options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1)]
        if name == PLAINTEXT:
            return grpc.aio.insecure_channel(address, options=options)
        options.append(("grpc.ssl_target_name_override", "localhost"))
        return grpc.aio.secure_channel(address, self._credentials[name], options=options)


class CertificateFuzzer:
    """A fuzzer that calls every port with every certificate."""

    def __init__(
        self,
        config: FuzzConfig,
        directory: Path,
        findings: Findings,
        replicas: Sequence[tuple[str, str]] = EACH_KIND,
    ) -> None:
        self._config, self._directory, self._findings, self._replicas = config, directory, findings, replicas
        self._clients = Clients(directory)
        self._statuses: Counter[str] = Counter()
        self._ports: dict[tuple[str, str], str] = {}  # role and kind of address -> address

    async def run(self, count: int) -> dict[str, Any]:
        """Make ``count`` calls, at least one of each client at each port, and return their figures."""
        async with self._serving() as processes:
            began = time.monotonic()
            pairs = [(port, client) for port in self._ports for client in self._clients.names]
            count = max(count, len(pairs))
            numbers = iter(range(self._config.first, self._config.first + count))
            async with asyncio.TaskGroup() as callers:
                for _ in range(min(count, self._config.concurrency)):
                    callers.create_task(self._call_all(numbers, pairs))
            seconds = time.monotonic() - began
            await self._check_servers(processes)
        for name in processes:
            log = (self._directory / f"{name}.log").read_text(errors="replace")
            for text in _LOGGED:
                if text in log:
                    self._add(-1, Wrong("log", f"{name}: {text}"))
        return {"requests": count, "seconds": round(seconds, 1), "statuses": dict(sorted(self._statuses.items()))}

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[dict[str, Process]]:
        """Start the servers and wait until they serve."""
        secured = flags(self._clients.authority, self._clients.server)
        with tempfile.TemporaryDirectory() as sockets, contextlib.ExitStack() as running:
            processes = {}
            for number, (of_worker, of_scheduler) in enumerate(self._replicas):
                for role, kind in (("worker", of_worker), ("scheduler", of_scheduler)):
                    unix = f"unix:{sockets}/{role}.sock"
                    self._ports[role, kind] = unix if kind == "unix" else f"127.0.0.1:{free_port()}"
                own: dict[str, dict[str, Any]] = {
                    "worker": _SIZES,
                    "scheduler": {"worker_addresses": self._ports["worker", of_worker]},
                }
                for role, kind in (("worker", of_worker), ("scheduler", of_scheduler)):
                    name, listen = f"{role}-{number}", {f"{role}_listen": self._ports[role, kind]}
                    log = self._directory / f"{name}.log"
                    processes[name] = Process(log, f"services.{role}", **listen, **own[role], **secured)
                    running.callback(processes[name].stop)
            async with asyncio.timeout(_START_S):
                for (role, kind), address in self._ports.items():
                    await self._wait_ready(role, kind, address, processes)
            yield processes

    async def _wait_ready(self, role: str, kind: str, address: str, processes: dict[str, Process]) -> None:
        client, (request, answer) = _right_client(kind), _CALLS[role][_CHECK]
        async with self._clients.open(client, address) as channel:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if (await _call(channel, _CHECK, request, answer))[-1].status == 1:
                        return
                if ended := [name for name, process in processes.items() if not process.running]:
                    raise RuntimeError(f"{ended} ended; logs are in {self._directory}")
                await asyncio.sleep(_RETRY_S)

    async def _call_all(self, numbers: Iterator[int], pairs: list[tuple[tuple[str, str], str]]) -> None:
        for number in numbers:
            port, client = pairs[number % len(pairs)]
            path = random_of(self._config.seed, "method", number).choice(list(_CALLS[port[0]]))
            try:
                await self._check(port, client, path)
            except Wrong as wrong:
                self._add(number, wrong)

    async def _check(self, port: tuple[str, str], client: str, path: str) -> None:
        """Call ``path`` as ``client``. Raises Wrong for another result than SECURITY.md promises."""
        role, kind = port
        code = grpc.StatusCode.OK
        async with self._clients.open(client, self._ports[port]) as channel:
            try:
                async with asyncio.timeout(self._config.answer_seconds):
                    await _call(channel, path, *_CALLS[role][path])
            except grpc.aio.AioRpcError as error:
                code = error.code()
            except TimeoutError:
                raise Wrong("late", f"{role} on {kind}: {path} with a certificate {client!r}") from None
        self._statuses[f"{client}: {code.name}"] += 1
        expected = grpc.StatusCode.OK if client in ACCEPTED[kind] else grpc.StatusCode.UNAVAILABLE
        if code is not expected:
            wrong = "let in" if code is grpc.StatusCode.OK else "status"
            raise Wrong(wrong, f"{role} on {kind}: {path} with a certificate {client!r}: {code.name}")

    async def _check_servers(self, processes: dict[str, Process]) -> None:
        """Check that every server still runs and serves."""
        for name, process in processes.items():
            if not process.running:
                self._add(-1, Wrong("crash", f"{name} ended with {process.status}"))
        for role, kind in self._ports:
            for path in _CALLS[role]:
                try:
                    await self._check((role, kind), _right_client(kind), path)
                except Wrong as wrong:
                    self._add(-1, wrong)

    def _add(self, number: int, wrong: Wrong) -> None:
        self._findings.add("certificates", number, wrong.kind, str(wrong))


async def _call(channel: grpc.aio.Channel, path: str, request: Message, answer: type[Message]) -> list[Any]:
    """Return all answers of one call. A unary call is a stream of one answer on the wire."""
    return [each async for each in channel.unary_stream(path, None, answer.FromString)(request.SerializeToString())]


def _right_client(kind: str) -> str:
    return PLAINTEXT if kind == "unix" else "right"


def _credentials(authority: Authority, pair: Pair | None) -> grpc.ChannelCredentials:
    key, chain = (None, None) if pair is None else (pair.key.read_bytes(), pair.cert.read_bytes())
    return grpc.ssl_channel_credentials(authority.cert.read_bytes(), key, chain)
