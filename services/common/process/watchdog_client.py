"""Starts the watchdog of a service and sends it heartbeats."""

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import termios
from collections.abc import Callable

import structlog

from services.common.config import ServiceFlags
from services.common.process import watchdog
from services.common.process.children import script_command
from services.common.process.log import is_console
from services.common.process.service import service_name

_BOOT_S = 300.0  # limit of the start, in which tokenizers are downloaded and loaded
_END_S = 60.0  # lowest limit of the shutdown, in which memory is freed
_LONGEST_INTERVAL_S = 1.0
_UNREAD_S = 10.0  # a watchdog that leaves heartbeats unread for longer is replaced
_LOAD_S = 60.0  # additional time before its first read

log = structlog.get_logger(__name__)


class WatchdogClient:
    """Context of a service's main task on the event loop, in which a watchdog process monitors the service.

    A heartbeat shows that the event loop runs and, once the service is ``serving``, that its work makes progress. The
    watchdog kills the process after a time without progress: ``boot_s`` before it serves, then ``step_deadline``, and
    at least a minute during shutdown. A watchdog that exited or reads no heartbeats is replaced.

    There is no watchdog with ``watchdog=F``, nor in a process that ``run_service`` did not start, such as a test.
    """

    def __init__(self, config: ServiceFlags, what: str, boot_s: float = _BOOT_S) -> None:
        """Create a client without starting the watchdog.

        ``what`` names the monitored work in the watchdog's message.
        """
        self._limits = (max(boot_s, config.step_deadline), config.step_deadline, max(_END_S, config.step_deadline))
        self._interval_s = min(_LONGEST_INTERVAL_S, config.step_deadline / 8)
        self._what = what
        self._log_format = "console" if is_console(config.log_format) else "json"
        self._enabled = config.watchdog and bool(service_name())
        self._serving = False
        self._progress: Callable[[], bool] = lambda: True
        self._pipe = -1  # stays open: its end makes the watchdog check that this process exits
        self._pid = 0  # of the watchdog; 0 if there is none
        self._unreaped: list[int] = []  # pids of replaced watchdogs
        self._unread = 0  # consecutive heartbeats that found the previous one unread

    async def __aenter__(self) -> "WatchdogClient":
        if self._enabled:
            self._start()
            self._sender = asyncio.create_task(self._send_heartbeats(), name="watchdog heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._enabled:
            self._sender.cancel()
            self._send(watchdog.ENDING)

    def serving(self, progress: Callable[[], bool] = lambda: True) -> None:
        """Apply the limit of the serving phase from now on.

        ``progress`` returns whether work was done since its last call, or there is none to do.
        """
        self._serving, self._progress = True, progress
        if self._enabled:
            self._send(watchdog.SERVING)

    async def _send_heartbeats(self) -> None:
        while True:
            self._unreaped = [pid for pid in self._unreaped if not _reap(pid)]
            self._unread = self._unread + 1 if self._is_unread() else 0
            # The time is counted in heartbeats, since both processes may be suspended.
            if self._unread * self._interval_s > _UNREAD_S:
                self._replace("it reads no heartbeats")
            self._send(watchdog.PROGRESS if self._progress() else watchdog.STUCK)
            await asyncio.sleep(self._interval_s)

    def _send(self, signal_byte: bytes) -> None:
        try:
            os.write(self._pipe, signal_byte)
        except BlockingIOError:
            pass  # the pipe is full of unread heartbeats
        except OSError as error:
            self._replace(str(error))

    def _is_unread(self) -> bool:
        """Return whether the pipe contains unread bytes."""
        count = array.array("i", [0])
        if self._pipe < 0:
            return False
        with contextlib.suppress(OSError):  # not every system supports this
            fcntl.ioctl(self._pipe, termios.FIONREAD, count)
        return count[0] > 0

    def _replace(self, reason: str) -> None:
        """Start another watchdog. Forget the old pid and descriptor, since the kernel may assign them again."""
        log.warning("the watchdog stopped and is started again", reason=reason)
        pipe, pid, self._pipe, self._pid = self._pipe, self._pid, -1, 0
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            self._unreaped.append(pid)
        if pipe >= 0:
            os.close(pipe)
        with contextlib.suppress(OSError):  # for example, too many processes; the next heartbeat tries again
            self._start()

    def _start(self) -> None:
        """Spawn the watchdog. A fork is not safe after gRPC or torch is loaded."""
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        arguments = [service_name(), str(os.getpid()), self._log_format, self._what, *map(str, self._limits)]
        command = script_command(watchdog.__file__, *arguments)
        files = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        try:
            self._pid = os.posix_spawn(command[0], command, os.environ, file_actions=files)
        finally:
            os.close(reading)
        self._unread = -int(_LOAD_S / self._interval_s)
        self._send(watchdog.SERVING if self._serving else watchdog.STUCK)  # lets _is_unread detect the first read


def _reap(pid: int) -> bool:
    """Reap the child ``pid`` without blocking. Return whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
