"""Keeps the child processes of a deployment running, and stops them all at the end.

Children that depend on each other, such as the workers of a replica, are a unit. Any other child is a unit of its own.
When a child exits, its unit is restarted. If a unit fails before it was ever ready, for example because of a wrong
flag, the deployment ends with the reason. A unit that was ready is restarted without limit, since other units serve
meanwhile, and its scheduler finds the cause, such as a request or a device. The pause before a restart grows while the
unit fails early.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from services.common.errors import PEER_LOST_STATUS, Unavailable
from services.common.host.private_files import usual_umask
from services.common.process.children import module_command, module_environment
from services.common.process.service import PARENT_PID, Stop
from services.launcher.deployment import ChildSpec, child_environment
from services.launcher.readiness import wait_until_ready

log = structlog.get_logger(__name__)

_SETTLED_S = 10.0  # a unit that was ready for this time is restarted with the first pause
FIRST_PAUSE_S = 0.1  # doubles with each earlier failure in a row
_LONGEST_PAUSE_S = 2.0  # of a unit that was ready: a few failures identify a poisoned request, while others wait
_LONGEST_START_PAUSE_S = 30.0  # of a unit that failed during its start
SHUTDOWN_MARGIN_S = 3.0  # for children to exit after the drain
STOP_GRACE_S = 10.0  # from the second SIGTERM to SIGKILL
PEER_GRACE_S = 5.0  # for a unit's other children to exit after one exited
_ERROR_LINES = 8
_LONGEST_LINE = 1024 * 1024
_READ_S = 1.0  # to read the last output of a child that exited


@dataclass(frozen=True)
class ChildExit:
    """Exit of a child process."""

    at: float  # time.monotonic()
    name: str
    status: int  # exit status; -N for signal N
    served_s: float | None  # time since it was ready; None if it never was
    last_lines: tuple[str, ...]  # of its stderr

    @property
    def reason(self) -> str:
        if self.status < 0:
            return f"{self.name} was killed by {signal.Signals(-self.status).name}"
        return f"{self.name} exited with status {self.status}"

    @property
    def on_request(self) -> bool:
        """True if it was stopped by SIGTERM, as in a rolling restart."""
        return self.status == 0 and self.served_s is not None

    @property
    def tail(self) -> str:
        return "".join(f"\n  {line}" for line in self.last_lines)


def write_line(line: bytes) -> None:
    """Write a line to stderr."""
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


class Child:
    """Child of the deployment, with one process at a time. Used on the supervisor's event loop."""

    def __init__(
        self,
        spec: ChildSpec,
        listener: socket.socket | None = None,
        forward: Callable[[bytes], None] = write_line,
    ) -> None:
        """Create a child without starting it.

        ``listener`` is the socket of a gateway, shared with this process. ``forward`` writes a line of the child's
        stderr.
        """
        self.spec = spec
        self._forward = forward
        self._listener = listener
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self._ready_at = 0.0
        self._forwarding: asyncio.Task[None] | None = None
        self._stderr: asyncio.ReadTransport | None = None
        self._last_lines: deque[str] = deque(maxlen=_ERROR_LINES)

    async def run_once(self) -> ChildExit:
        """Start the process. Return when it has exited, after killing all processes that it started."""
        process = await self._start()
        log.debug("child started", child=self.spec.name, pid=process.pid)
        readiness = asyncio.create_task(self._note_ready())
        try:
            status = await process.wait()
            at = time.monotonic()
            if self._listener is not None and self.spec.handover is not None:
                self.spec.handover.leave(self._listener)
            await self._end_group(process)
        finally:
            readiness.cancel()
        served_s = at - self._ready_at if self.ready.is_set() else None
        self.ready.clear()
        return ChildExit(at, self.spec.name, status, served_s, tuple(self._last_lines))

    async def stop(self, stop: Stop | None = None, drain_s: float = 0.0) -> None:
        """Stop the process. Idempotent.

        The first SIGTERM lets it drain for ``drain_s`` seconds, the second makes it exit at once, then it is killed. It
        is killed early if ``stop.at_once`` is set.
        """
        process, stop = self.process, stop or Stop()
        if process is None or process.returncode is not None:
            return
        for timeout_s in (drain_s + SHUTDOWN_MARGIN_S, STOP_GRACE_S):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if await stop.within(timeout_s, process.wait) or stop.at_once.is_set():
                break
        else:
            log.warning("child did not exit in time and is killed", child=self.spec.name)
        await self._end_group(process)

    async def _end_group(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process and its process group, which would outlive it and keep its stderr open."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding}, timeout=_READ_S)
            self._forwarding.cancel()
        if self._stderr is not None:
            self._stderr.close()  # a process outside the group may have its other end

    async def _start(self) -> asyncio.subprocess.Process:
        environment = child_environment(self.spec, module_environment(os.environ)) | {PARENT_PID: str(os.getpid())}
        inherited = []
        if self._listener is not None and self.spec.handover is not None:
            inherited.append(self._listener.fileno())
            environment |= replace(self.spec.handover, listener=self._listener.fileno()).environment
        command = module_command(self.spec.module, *self.spec.flags)
        # In its own session the child does not receive Ctrl-C, so the children can be stopped in order.
        # With asyncio's own pipe, ``wait`` would wait for every process that has the child's stderr.
        reading, writing = os.pipe()
        try:
            stderr = asyncio.StreamReader(limit=_LONGEST_LINE)
            self._stderr, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(reading, "rb")
            )
            self.process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stderr=writing,
                pass_fds=inherited,
                start_new_session=True,
                umask=usual_umask(),
            )
        finally:
            os.close(writing)
        self._forwarding = asyncio.create_task(self._forward_errors(stderr))
        return self.process

    async def _note_ready(self) -> None:
        await wait_until_ready(self.spec)
        self._ready_at = time.monotonic()
        self.ready.set()

    async def _forward_errors(self, stderr: asyncio.StreamReader) -> None:
        """Forward the child's stderr, and keep its last lines for the error message."""
        while line := await _read_line(stderr):
            self._forward(line)
            self._last_lines.append(line.decode(errors="replace").rstrip())


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or a piece of a very long line, or nothing at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


class Unit:
    """Children that are started together, and restarted together when one exits."""

    def __init__(self, children: list[Child], peer_grace_s: float = PEER_GRACE_S) -> None:
        self._children = children
        self._peer_grace_s = peer_grace_s
        self._served = False
        self._pause_s = FIRST_PAUSE_S

    async def run(self) -> None:
        """Start the processes and restart them. Raises ``Unavailable`` if they exit before they were ever ready."""
        while True:
            cause = await self._run_once()
            self._served |= cause.served_s is not None
            if not self._served:
                raise Unavailable(f"{cause.reason} before it was ready{cause.tail}")
            peers = [child.spec.name for child in self._children if child.spec.name != cause.name]
            if cause.on_request:
                log.info("child was stopped and is started again", child=cause.name, peers=peers)
            else:
                self._pause_s = next_pause(self._pause_s, cause.served_s)
                facts = {"child": cause.name, "reason": cause.reason, "in_s": self._pause_s, "peers": peers}
                log.error("child exited and is started again", **facts)
                await asyncio.sleep(self._pause_s)

    async def _run_once(self) -> ChildExit:
        """Run all processes until they have exited. Return the exit that caused the others."""
        runs = [asyncio.create_task(child.run_once()) for child in self._children]
        try:
            await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            ended, stuck = await asyncio.wait(runs, timeout=self._peer_grace_s)
            exits = sorted((run.result() for run in ended), key=lambda each: each.at)
            if stuck:
                await asyncio.gather(*(child.stop() for child in self._children))
                await asyncio.wait(stuck)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        return next((each for each in exits if each.status != PEER_LOST_STATUS), exits[0])


def next_pause(before_s: float, served_s: float | None) -> float:
    """Return the pause before a restart, given the pause before and ``ChildExit.served_s``."""
    if served_s is None:
        return min(2 * before_s, _LONGEST_START_PAUSE_S)
    return FIRST_PAUSE_S if served_s >= _SETTLED_S else min(2 * before_s, _LONGEST_PAUSE_S)


async def supervise(
    specs: list[ChildSpec],
    listeners: list[socket.socket],
    stop: Stop,
    on_ready: Callable[[], Awaitable[None]],
    drain_s: float = 0.0,
    forward: Callable[[bytes], None] = write_line,
) -> None:
    """Run the children until ``stop`` is set. Call ``on_ready`` once, when all of them are ready.

    Each gateway gets one of ``listeners``. They are closed before the gateways stop, so new connections are refused.
    Gateways stop first and workers last, and drain for ``drain_s`` seconds in all. ``forward`` writes each line of the
    children's stderr. Raises ``Unavailable`` with the reason if a unit exits before it was ever ready.
    """
    remaining = iter(listeners)
    children = [Child(spec, next(remaining) if spec.handover is not None else None, forward) for spec in specs]
    units = [Unit(members) for members in _by_unit(children)]
    runs = [asyncio.create_task(unit.run()) for unit in units]
    announce = asyncio.create_task(_announce(children, on_ready))
    stopped = asyncio.create_task(stop.wait())
    try:
        pending, ended = {*runs, announce, stopped}, set[asyncio.Task[Any]]()
        while not ended - {announce}:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                each.result()
    finally:
        announce.cancel()
        stopped.cancel()
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, announce, stopped, return_exceptions=True)
        for listener in listeners:
            listener.close()
        drained_at = time.monotonic() + drain_s
        for role in reversed(dict.fromkeys(spec.role for spec in specs)):
            left_s = max(0.0, drained_at - time.monotonic())
            await asyncio.gather(*(child.stop(stop, left_s) for child in children if child.spec.role == role))


def _by_unit(children: list[Child]) -> list[list[Child]]:
    """Return the children of each unit."""
    units: dict[str, list[Child]] = {}
    for child in children:
        units.setdefault(child.spec.unit or child.spec.name, []).append(child)
    return list(units.values())


async def _announce(children: list[Child], on_ready: Callable[[], Awaitable[None]]) -> None:
    for child in children:
        await child.ready.wait()
    await on_ready()
