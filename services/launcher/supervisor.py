"""Keeps the children of one deployment running, and leaves nothing behind.

Children that cannot go on without each other, such as the workers of a replica, are a unit; any other is a unit of its
own. When one dies, its unit is started again. A unit that dies before it ever served, as by a wrong flag, ends the
deployment with the reason. One that has served never does, however often it dies: others serve meanwhile, and what it
dies of, a request or its device, is for its scheduler to find. It only has to wait, longer each time that it has hardly
served.
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

_SETTLED_S = 10.0  # who has served for so long is started again soon
_FIRST_PAUSE_S = 0.1  # it doubles with each death in a row before that
_LONGEST_PAUSE_S = 2.0  # of who was ready: a few such deaths find a poisoned request, while others wait
_HOPELESS_PAUSE_S = 30.0  # of who was not
LAST_WORDS_S = 3.0  # for children to end by themselves behind the drain
STOP_GRACE_S = 10.0  # to end at once
PEER_GRACE_S = 5.0  # for those whose peer has died to notice
_ERROR_LINES = 8
_LONGEST_LINE = 1024 * 1024
_READ_S = 1.0  # to read what a dead child wrote last


@dataclass(frozen=True)
class Death:
    """How a child ended."""

    at: float  # time.monotonic()
    name: str
    status: int  # of its exit; -N = signal N
    served_s: float | None  # None: it was not ready yet
    last_lines: tuple[str, ...]  # of its stderr

    @property
    def reason(self) -> str:
        if self.status < 0:
            return f"{self.name} was ended by {signal.Signals(-self.status).name}"
        return f"{self.name} ended with exit status {self.status}"

    @property
    def on_request(self) -> bool:
        """Somebody sent it SIGTERM, as a rolling restart does."""
        return self.status == 0 and self.served_s is not None

    @property
    def tail(self) -> str:
        return "".join(f"\n  {line}" for line in self.last_lines)


def write_plainly(line: bytes) -> None:
    """Write a line to stderr."""
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


class Child:
    """One child, a process at a time. Owned by the supervisor's asyncio loop."""

    def __init__(
        self,
        spec: ChildSpec,
        listener: socket.socket | None = None,
        forward: Callable[[bytes], None] = write_plainly,
    ) -> None:
        """``listener``: a gateway's, which it shares with this process. ``forward`` writes a line of the child's
        stderr."""
        self.spec = spec
        self._forward = forward
        self._listener = listener
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self._ready_at = 0.0
        self._forwarding: asyncio.Task[None] | None = None
        self._stderr: asyncio.ReadTransport | None = None
        self._last_lines: deque[str] = deque(maxlen=_ERROR_LINES)

    async def live(self) -> Death:
        """Start the process; returns when it has died, and whatever it started with it."""
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
        return Death(at, self.spec.name, status, served_s, tuple(self._last_lines))

    async def stop(self, stop: Stop | None = None, drain_s: float = 0.0) -> None:
        """Ask the process to end, after what it has to do; after ``drain_s`` seconds to end at once; then make it end,
        which is also what comes next when ``stop`` shall be at once. Idempotent."""
        process, stop = self.process, stop or Stop()
        if process is None or process.returncode is not None:
            return
        for patience_s in (drain_s + LAST_WORDS_S, STOP_GRACE_S):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if await stop.within(patience_s, process.wait) or stop.at_once.is_set():
                break
        else:
            log.warning("child did not end in time and is killed", child=self.spec.name)
        await self._end_group(process)

    async def _end_group(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process and whatever it started, which would outlive it and keep its stderr open."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding}, timeout=_READ_S)
            self._forwarding.cancel()
        if self._stderr is not None:
            self._stderr.close()  # somebody may have left the group and have its other end

    async def _start(self) -> asyncio.subprocess.Process:
        environment = child_environment(self.spec, module_environment(os.environ)) | {PARENT_PID: str(os.getpid())}
        inherited = []
        if self._listener is not None and self.spec.handover is not None:
            inherited.append(self._listener.fileno())
            environment |= replace(self.spec.handover, listener=self._listener.fileno()).environment
        command = module_command(self.spec.module, *self.spec.flags)
        # A session of its own: Ctrl-C reaches us alone, and we end the children in order.
        # A pipe of our own: asyncio's makes ``wait`` wait for everybody who has the child's stderr, not for the child.
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
        """Pass the child's stderr on, and keep its end for the reason."""
        while line := await _read_line(stderr):
            self._forward(line)
            self._last_lines.append(line.decode(errors="replace").rstrip())


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or a piece of one that is very long; empty at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


class Unit:
    """Children that are started together, and all of them again when one dies."""

    def __init__(self, children: list[Child], peer_grace_s: float = PEER_GRACE_S) -> None:
        self._children = children
        self._peer_grace_s = peer_grace_s
        self._served = False
        self._pause_s = _FIRST_PAUSE_S

    async def run(self) -> None:
        """Start the processes, again and again. Raises ``Unavailable`` if they die before they ever served."""
        while True:
            cause = await self._live()
            self._served |= cause.served_s is not None
            if not self._served:
                raise Unavailable(f"{cause.reason} before it was ready{cause.tail}")
            peers = [child.spec.name for child in self._children if child.spec.name != cause.name]
            if cause.on_request:
                log.info("child was stopped and is started again", child=cause.name, peers=peers)
            else:
                self._pause_s = _next_pause(self._pause_s, cause.served_s)
                told = {"child": cause.name, "reason": cause.reason, "in_s": self._pause_s, "peers": peers}
                log.error("child died and is started again", **told)
                await asyncio.sleep(self._pause_s)

    async def _live(self) -> Death:
        """Until all have died; returns the death that was the others', too."""
        lives = [asyncio.create_task(child.live()) for child in self._children]
        try:
            await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            ended, stuck = await asyncio.wait(lives, timeout=self._peer_grace_s)
            deaths = sorted((life.result() for life in ended), key=lambda death: death.at)
            if stuck:
                await asyncio.gather(*(child.stop() for child in self._children))
                await asyncio.wait(stuck)
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
        return next((death for death in deaths if death.status != PEER_LOST_STATUS), deaths[0])


def _next_pause(before_s: float, served_s: float | None) -> float:
    """Until a unit is started again, by the pause before this life, of which ``served_s`` is what ``Death`` says."""
    if served_s is None:
        return min(2 * before_s, _HOPELESS_PAUSE_S)
    return _FIRST_PAUSE_S if served_s >= _SETTLED_S else min(2 * before_s, _LONGEST_PAUSE_S)


async def supervise(
    specs: list[ChildSpec],
    listeners: list[socket.socket],
    stop: Stop,
    on_ready: Callable[[], Awaitable[None]],
    drain_s: float = 0.0,
    forward: Callable[[bytes], None] = write_plainly,
) -> None:
    """Run the children until ``stop`` is set; call ``on_ready`` once, when all of them serve. Each gateway gets one of
    ``listeners``, which are closed before the gateways are ended: whoever connects from then on shall hear of it.

    Raises ``Unavailable`` with the reason when a unit dies before it ever served. Ends gateways first and workers last;
    what they have to do may go on for ``drain_s`` seconds in all. ``forward`` writes each line of the children's
    stderr.
    """
    waiting = iter(listeners)
    children = [Child(spec, next(waiting) if spec.handover is not None else None, forward) for spec in specs]
    units = [Unit(members) for members in _together(children)]
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


def _together(children: list[Child]) -> list[list[Child]]:
    """The children of each unit."""
    units: dict[str, list[Child]] = {}
    for child in children:
        units.setdefault(child.spec.unit or child.spec.name, []).append(child)
    return list(units.values())


async def _announce(children: list[Child], on_ready: Callable[[], Awaitable[None]]) -> None:
    for child in children:
        await child.ready.wait()
    await on_ready()
