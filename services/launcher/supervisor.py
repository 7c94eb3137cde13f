"""Keeps the children of one deployment running, and leaves nothing behind.

A child that dies after it has served is started again, with a growing delay. A child that dies before it ever served,
or too often, ends the deployment with the reason.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import structlog

from services.common.errors import Unavailable
from services.common.process import PARENT_PID
from services.launcher.deployment import ChildSpec, child_environment
from services.launcher.readiness import wait_until_ready

log = structlog.get_logger(__name__)

RESTARTS_ALLOWED = 5
RESTART_WINDOW_S = 60.0
STOP_GRACE_S = 10.0
_ERROR_LINES = 8
_LONGEST_LINE = 1024 * 1024
_LAST_WORDS_S = 1.0  # to read what a dead child wrote last


class Child:
    """One child process and its restarts. Owned by the supervisor's asyncio loop."""

    def __init__(self, spec: ChildSpec, listener: socket.socket | None = None) -> None:
        """``listener``: a gateway's, which it shares with this process."""
        self.spec = spec
        self._listener = listener
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self._forwarding: asyncio.Task | None = None
        self._deaths: deque[float] = deque()
        self._last_lines: deque[str] = deque(maxlen=_ERROR_LINES)

    async def run(self) -> None:
        """Start the process, and again whenever it dies. Raises ``Unavailable`` when there is no point any more."""
        while True:
            await self._start()
            log.debug("child started", child=self.spec.name, pid=self.process.pid)
            served = await self._watch()
            reason = f"{self.spec.name} {_how_it_ended(self.process.returncode)}"
            if not served:
                raise Unavailable(f"{reason} before it was ready{self._tail()}")
            self._deaths.append(time.monotonic())
            while self._deaths[0] < time.monotonic() - RESTART_WINDOW_S:
                self._deaths.popleft()
            if len(self._deaths) > RESTARTS_ALLOWED:
                raise Unavailable(
                    f"{reason}, more than {RESTARTS_ALLOWED} times in {RESTART_WINDOW_S:.0f} s{self._tail()}"
                )
            log.error("child died and is started again", child=self.spec.name, reason=reason)
            await asyncio.sleep(0.1 * 2 ** (len(self._deaths) - 1))

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask the process to end; make it end after ``grace_s`` seconds. Idempotent."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), grace_s)
        except TimeoutError:
            log.warning("child did not end in time and is killed", child=self.spec.name)
        await self._end_group()

    async def _end_group(self) -> None:
        """Kill the process and whatever it started, which would outlive it and keep its stderr open."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await asyncio.wait({self._forwarding}, timeout=_LAST_WORDS_S)
        self._forwarding.cancel()

    async def _start(self) -> None:
        environment = child_environment(self.spec, dict(os.environ)) | {PARENT_PID: str(os.getpid())}
        inherited = []
        if self._listener is not None:
            inherited.append(self._listener.fileno())
            environment |= replace(self.spec.handover, listener=self._listener.fileno()).environment
        command = [sys.executable, "-m", self.spec.module, *self.spec.flags]
        # A session of its own: Ctrl-C reaches us alone, and we end the children in order.
        # A pipe of our own: asyncio's makes ``wait`` wait for everybody who has the child's stderr, not for the child.
        reading, writing = os.pipe()
        try:
            stderr = asyncio.StreamReader(limit=_LONGEST_LINE)
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(reading, "rb")
            )
            self.process = await asyncio.create_subprocess_exec(
                *command, env=environment, stderr=writing, pass_fds=inherited, start_new_session=True
            )
        finally:
            os.close(writing)
        self._forwarding = asyncio.create_task(self._forward_errors(stderr))

    async def _watch(self) -> bool:
        """Until the process has died; returns whether it served."""
        readiness = asyncio.create_task(self._note_ready())
        try:
            await self.process.wait()
            await self._end_group()
        finally:
            readiness.cancel()
        served, _ = self.ready.is_set(), self.ready.clear()
        return served

    async def _note_ready(self) -> None:
        await wait_until_ready(self.spec)
        self.ready.set()

    async def _forward_errors(self, stderr: asyncio.StreamReader) -> None:
        """Pass the child's stderr on, and keep its end for the reason."""
        while line := await stderr.readline():
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._last_lines.append(line.decode(errors="replace").rstrip())

    def _tail(self) -> str:
        return "".join(f"\n  {line}" for line in self._last_lines)


async def supervise(
    specs: list[ChildSpec], listeners: list[socket.socket], stop: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    """Run the children until ``stop`` is set; call ``on_ready`` once, when all of them serve. Each gateway gets one of
    ``listeners``, which are closed before the gateways are ended: whoever connects from then on shall hear of it.

    Raises ``Unavailable`` with the reason when a child cannot be kept running. Ends gateways first and workers last.
    """
    waiting = iter(listeners)
    children = [Child(spec, next(waiting) if spec.handover is not None else None) for spec in specs]
    runs = [asyncio.create_task(child.run()) for child in children]
    announce = asyncio.create_task(_announce(children, on_ready))
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([*runs, stopped], return_when=asyncio.FIRST_COMPLETED)
        for run in done - {stopped}:
            run.result()
    finally:
        announce.cancel()
        stopped.cancel()
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, announce, stopped, return_exceptions=True)
        for listener in listeners:
            listener.close()
        for role in reversed(dict.fromkeys(spec.role for spec in specs)):
            await asyncio.gather(*(child.stop() for child in children if child.spec.role == role))


async def _announce(children: list[Child], on_ready: Callable[[], None]) -> None:
    for child in children:
        await child.ready.wait()
    on_ready()


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with exit status {returncode}"
