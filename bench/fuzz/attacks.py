"""Clients that use up memory, file descriptors or the event loop without a wrong byte: ``surface=attacks``.

Each attack holds its connections for a few seconds. A finding is a service whose memory grew beyond the attack's bound,
or that does not answer soon after the attack has ended. ``Target.look_at_logs`` finds tracebacks.
"""

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.fuzz.findings import Findings
from bench.fuzz.http2 import connect, open_streams
from bench.fuzz.target import Target

# Flags of the attacked services: timeouts of seconds instead of minutes.
FLAGS = ("slow_client_seconds=3", "log_level=WARNING")
_HOLD_S = 8.0
_ANSWER_S = 5.0
_RECOVERY_S = 15.0
_LOOK_S = 0.1
_MIB = 1024 * 1024
_FEW_FILES = 128  # of a gateway whose clients hold more connections
_GENERATE = "/tokasaurus.scheduler.v1.SchedulerService/Generate"
_FILE_BYTES = 900_000
_READERS = 50


@dataclass(frozen=True)
class Attack:
    """An attack on the service ``role``. A growth of its memory beyond ``most_mib`` is a finding."""

    name: str
    role: str
    most_mib: int
    run: Callable[[contextlib.ExitStack], None]


class Attacks:
    """All attacks on one deployment, one after the other."""

    def __init__(self, target: Target, findings: Findings) -> None:
        self._target, self._findings = target, findings
        self._gateway = httpx.URL(target.url)
        host, _, port = target.scheduler.rpartition(":")
        self._scheduler = host, int(port)
        self._headers = {"authorization": target.credentials.of("team-a")} if target.credentials.flags else {}

    async def run(self) -> dict[str, Any]:
        """Return, by attack, the MiB by which the service grew and the seconds until it answered again."""
        # The largest comes last: memory that a service has freed and kept would hide the growth of the next.
        attacks = (
            Attack("idle connections", "gateway-0", 50, self._idle_connections),
            Attack("idle gRPC connections", "scheduler-0", 100, self._idle_grpc_connections),
            Attack("unread downloads", "gateway-0", 150, self._unread_downloads),
            Attack("trickling readers", "gateway-0", 150, self._trickling_readers),
            Attack("rapid reset", "scheduler-0", 600, lambda held: self._streams(held, reset=True)),
            Attack("open streams", "scheduler-0", 1100, lambda held: self._streams(held, reset=False)),
        )
        return {attack.name: await self._measure(attack) for attack in attacks}

    async def _measure(self, attack: Attack) -> dict[str, float]:
        pid = self._target.pid(attack.role)
        before = most = _resident_mib(pid)
        with contextlib.ExitStack() as held:
            running = asyncio.create_task(asyncio.to_thread(attack.run, held))
            while not running.done():
                most = max(most, _resident_mib(pid))
                await asyncio.sleep(_LOOK_S)
            await running
        ended = time.monotonic()
        answers = False
        while not answers and time.monotonic() - ended < _RECOVERY_S:
            answers = await asyncio.to_thread(self._answers)
        if not answers:
            self._findings.add("attacks", -1, "no recovery", f"{attack.name}: no answer for {_RECOVERY_S:g} s")
        if most - before > attack.most_mib:
            self._findings.add("attacks", -1, "memory", f"{attack.name}: {attack.role} grew by {most - before} MiB")
        return {"grew_mib": most - before, "recovered_s": round(time.monotonic() - ended, 1)}

    def _answers(self) -> bool:
        body = {"prompt": [20, 30], "max_tokens": 2}
        try:
            url = f"{self._target.url}/v1/completions"
            return httpx.post(url, json=body, headers=self._headers, timeout=_ANSWER_S, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def _idle_connections(self, held: contextlib.ExitStack) -> None:
        pid = self._target.pid("gateway-0")
        limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_FEW_FILES, limit[1]))
        held.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, limit)
        for _ in range(2 * _FEW_FILES):
            held.enter_context(self._connect())
        time.sleep(_HOLD_S)

    def _idle_grpc_connections(self, held: contextlib.ExitStack) -> None:
        for _ in range(1000):
            held.enter_context(connect(*self._scheduler))
        time.sleep(_HOLD_S)

    def _unread_downloads(self, held: contextlib.ExitStack) -> None:
        path = self._upload()
        for _ in range(500):
            self._ask(held, path)
        time.sleep(_HOLD_S)

    def _trickling_readers(self, held: contextlib.ExitStack) -> None:
        path, pid = self._upload(), self._target.pid("gateway-0")
        idle = _open_sockets(pid)
        readers = [self._ask(held, path) for _ in range(_READERS)]
        time.sleep(1)  # until they are connected; none is cut off before slow_client_seconds
        end = time.monotonic() + 2 * _HOLD_S
        while time.monotonic() < end and (left := _open_sockets(pid) - idle) > _READERS // 10:
            for reader in readers:
                reader.setblocking(False)
                with contextlib.suppress(OSError):
                    reader.recv(1)
            time.sleep(_LOOK_S)
        if left > _READERS // 10:
            self._findings.add("attacks", -1, "slow reader", f"{left} trickling readers were not cut off")

    def _streams(self, held: contextlib.ExitStack, *, reset: bool) -> None:
        for _ in range(8):
            connection = held.enter_context(connect(*self._scheduler))
            open_streams(connection, _GENERATE, 200_000 if reset else 16_000, reset=reset, seconds=_HOLD_S / 4)

    def _upload(self) -> str:
        """Store a file and return the path of its content."""
        form = {"data": {"purpose": "user_data"}, "files": {"file": ("attack", bytes(_FILE_BYTES))}}
        url = f"{self._target.url}/v1/files"
        answer = httpx.post(url, headers=self._headers, timeout=60, trust_env=False, **form)  # type: ignore[arg-type]
        return f"/v1/files/{answer.raise_for_status().json()['id']}/content"

    def _ask(self, held: contextlib.ExitStack, path: str) -> socket.socket:
        client = held.enter_context(self._connect())
        head = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        # Requests behind the first are answered one after the other: more than the kernel holds.
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: {self._gateway.host}\r\n{head}\r\n".encode() * 32)
        return client

    def _connect(self) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(_ANSWER_S)
        client.connect((self._gateway.host, self._gateway.port))
        return client


def _open_sockets(pid: int) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since the listing
            count += str(link.readlink()).startswith("socket:")
    return count


def _resident_mib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended, which ``Target.look`` finds
        return 0
    return next((int(line.split()[1]) * 1024 // _MIB for line in lines if line.startswith("VmRSS")), 0)
