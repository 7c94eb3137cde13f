"""The pulse of a service, by which its watchdog knows that it gets on."""

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
from services.common.process.service import own_name

_BOOT_S = 300.0  # to begin; tokenizers are fetched and loaded
_END_S = 60.0  # at least; what is loaded has to be let go
_LONGEST_INTERVAL_S = 1.0
_DEAF_S = 10.0  # a watchdog that reads no beat for so long is stopped
_LOAD_S = 60.0  # which it has for its first

log = structlog.get_logger(__name__)


class Pulse:
    """Owned by the asyncio loop, around everything that the service does there. Where ``run_service`` did not begin
    the process, as in tests, and with ``watchdog=F``, nobody feels it.

    A beat says that the event loop turns and, once the service is ``serving``, that its work gets done. The watchdog
    kills the process when there was none for ``step_deadline`` seconds; for ``boot_s`` before it serves, since that
    may take long; for a minute when it ends. A watchdog that is gone, or reads no beats, is replaced.
    """

    def __init__(self, config: ServiceFlags, what: str, boot_s: float = _BOOT_S) -> None:
        """``what`` makes the progress, in the watchdog's words."""
        self._limits = (max(boot_s, config.step_deadline), config.step_deadline, max(_END_S, config.step_deadline))
        self._interval_s = min(_LONGEST_INTERVAL_S, config.step_deadline / 8)
        self._what = what
        self._log_format = "console" if is_console(config.log_format) else "json"
        self._watched = config.watchdog and bool(own_name())
        self._serving = False
        self._progress: Callable[[], bool] = lambda: True
        self._pipe = -1  # never closed: the watchdog also sees to it that the process ends
        self._pid = 0  # of the watchdog; 0 = there is none
        self._gone: list[int] = []  # pids of those before it that have not been buried yet
        self._unread = 0  # beats in a row that found what was said before them unread

    async def __aenter__(self) -> "Pulse":
        if self._watched:
            self._start()
            self._beating = asyncio.create_task(self._beat(), name="pulse")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watched:
            self._beating.cancel()
            self._say(watchdog.ENDING)

    def serving(self, progress: Callable[[], bool] = lambda: True) -> None:
        """From now on ``progress`` is asked, again and again, whether there was any since it was asked last, or
        nothing to do."""
        self._serving, self._progress = True, progress
        if self._watched:
            self._say(watchdog.SERVING)

    async def _beat(self) -> None:
        while True:
            self._gone = [pid for pid in self._gone if not _buried(pid)]
            self._unread = self._unread + 1 if self._is_unread() else 0
            if self._unread * self._interval_s > _DEAF_S:  # in beats: both may have been stopped together
                self._replace("it reads nothing: it is stopped")
            self._say(watchdog.PROGRESS if self._progress() else watchdog.STUCK)
            await asyncio.sleep(self._interval_s)

    def _say(self, sign: bytes) -> None:
        try:
            os.write(self._pipe, sign)
        except BlockingIOError:
            pass  # it has more to read than it needs
        except OSError as error:
            self._replace(str(error))

    def _is_unread(self) -> bool:
        """Whether something of what was said lies in the pipe still."""
        count = array.array("i", [0])
        if self._pipe < 0:
            return False
        with contextlib.suppress(OSError):  # not every system knows
            fcntl.ioctl(self._pipe, termios.FIONREAD, count)
        return count[0] > 0

    def _replace(self, reason: str) -> None:
        """The watchdog is gone, or as good as that. Forget its numbers, which something else may have next."""
        log.warning("the watchdog is gone and is started again", reason=reason)
        pipe, pid, self._pipe, self._pid = self._pipe, self._pid, -1, 0
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # nobody has buried it, so that the number is its own
            self._gone.append(pid)
        if pipe >= 0:
            os.close(pipe)
        with contextlib.suppress(OSError):  # such as too many processes: with the next beat
            self._start()

    def _start(self) -> None:
        """Spawned, not forked: gRPC and torch may be loaded."""
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        words = [own_name(), str(os.getpid()), self._log_format, self._what, *map(str, self._limits)]
        command = script_command(watchdog.__file__, *words)
        files = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        try:
            self._pid = os.posix_spawn(command[0], command, os.environ, file_actions=files)
        finally:
            os.close(reading)
        self._unread = -int(_LOAD_S / self._interval_s)
        self._say(watchdog.SERVING if self._serving else watchdog.STUCK)  # something that it can read


def _buried(pid: int) -> bool:
    """Whether nothing is left of a child; who is in its debugger's hands is not waited for."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
