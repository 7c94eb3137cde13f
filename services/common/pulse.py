"""The pulse of a service, by which its watchdog knows that it gets on."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable

import structlog

from services.common import watchdog
from services.common.config import ServiceConfig
from services.common.process import own_name

_BOOT_S = 300.0  # to begin; tokenizers are fetched and loaded
_END_S = 60.0  # at least; what is loaded has to be let go
_LONGEST_INTERVAL_S = 1.0

log = structlog.get_logger(__name__)


class Pulse:
    """Owned by the asyncio loop, around everything that the service does there. Where ``run_service`` did not begin
    the process, as in tests, and with ``watchdog=F``, nobody feels it.

    A beat says that the event loop turns and, once the service is ``serving``, that its work gets done. The watchdog
    kills the process when there was none for ``step_deadline`` seconds; for ``boot_s`` before it serves, since that
    may take long; for a minute when it ends.
    """

    def __init__(self, config: ServiceConfig, what: str, boot_s: float = _BOOT_S) -> None:
        """``what`` makes the progress, in the watchdog's words."""
        self._limits = (max(boot_s, config.step_deadline), config.step_deadline, max(_END_S, config.step_deadline))
        self._interval_s = min(_LONGEST_INTERVAL_S, config.step_deadline / 8)
        self._what = what
        self._watched = config.watchdog and bool(own_name())
        self._serving = False
        self._progress: Callable[[], bool] = lambda: True
        self._pipe = -1  # never closed: the watchdog also sees to it that the process ends
        self._pid = 0  # of the watchdog; 0 = there is none

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
            self._say(watchdog.PROGRESS if self._progress() else watchdog.STUCK)
            await asyncio.sleep(self._interval_s)

    def _say(self, sign: bytes) -> None:
        try:
            os.write(self._pipe, sign)
        except BlockingIOError:
            pass  # it has more to read than it needs
        except OSError as error:
            log.warning("the watchdog is gone and is started again", reason=str(error))
            self._bury()
            with contextlib.suppress(OSError):  # such as too many processes: with the next beat
                self._start()

    def _bury(self) -> None:
        """The watchdog is gone. Forget its numbers, which something else may have next."""
        pipe, pid, self._pipe, self._pid = self._pipe, self._pid, -1, 0
        if pipe >= 0:
            os.close(pipe)
        if pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # who is in its debugger's hands is not waited for

    def _start(self) -> None:
        """Spawned, not forked: gRPC and torch may be loaded."""
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-I", "-S", watchdog.__file__, own_name(), str(os.getpid()), self._what]
        command += map(str, self._limits)
        files = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        try:
            self._pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=files)
        finally:
            os.close(reading)
        if self._serving:
            self._say(watchdog.SERVING)
