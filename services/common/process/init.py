"""Process 1 of a container, in front of a service: ``python -m services.common.process.init COMMAND...``.

The kernel spares process 1 all signals that its own container sends and that it does not handle, a watchdog's SIGKILL
among them. So the service is a child of this one, which passes signals on, buries whoever died, and ends as its child
does. Images begin with it, so that a SIGTERM that comes while a service is being loaded is not lost.
"""

import contextlib
import os
import signal
import sys

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def stand_in_front() -> None:
    """Put this program into the place of the calling one if that is process 1; it starts the same command again."""
    if os.getpid() == 1:
        command = [sys.executable, "-I", "-S", __file__, sys.executable, *sys.orig_argv[1:]]
        os.execv(sys.executable, command)


def main() -> None:
    """The program. Exit status: the child's; 128 + N if signal N ended it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until there is somebody to pass them on to
    child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, setsigmask=())
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: _pass_on(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _pass_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(child, number)


if __name__ == "__main__":
    main()
