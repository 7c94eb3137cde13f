"""Process 1 of a container, the parent of a service: ``python -m services.common.process.init COMMAND...``.

Process 1 does not receive signals from its own container that it does not handle, not even SIGKILL from a watchdog. So
the service runs as a child of this program, which forwards signals, reaps processes that exited, and exits with the
child's status. Images start with it, so a SIGTERM that arrives while a service is loading is not lost.
"""

import contextlib
import os
import signal
import sys

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_under_init() -> None:
    """Replace this process with the init program if it is process 1. Init then starts the same command as its child."""
    if os.getpid() == 1:
        command = [sys.executable, "-I", "-S", __file__, sys.executable, *sys.orig_argv[1:]]
        os.execv(sys.executable, command)


def main() -> None:
    """Run the command. Exit with the child's status, or 128 + N if signal N ended it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until the child runs
    child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, setsigmask=())
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: _forward(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _forward(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just exited
        os.kill(child, number)


if __name__ == "__main__":
    main()
