"""The watchdog of a service: its child, a process that loads next to nothing and kills it when it hangs.

``services.common.process.pulse`` starts it, with this file alone:
``watchdog.py SERVICE PID FORMAT WHAT BOOT_S STEP_S END_S``.

Its stdin is a pipe from the service, which sends a byte whenever it has looked at itself. It ends when the pipe does,
or with its parent, which the process PID has to be: it kills no other. FORMAT is that of its last words, json or
console.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time

PROGRESS = b"."  # since the last look, or there was nothing to do
STUCK = b"-"  # none, and there is work
SERVING = b"s"  # from now on the second limit counts
ENDING = b"e"  # the third

_TICK_S = 0.25
_WRITE_S = 0.5  # for what reads our last words


def watch(pipe: int, parent: int, limits: tuple[float, float, float], what: str, tick_s: float = _TICK_S) -> str:
    """Until the service ``parent`` has made no progress for so long as its phase (boot, serving, end) allows: what is
    the matter. Empty when there is nothing to watch any more.

    Only seconds count in which this process itself ran: where all were stopped together, as on a machine that sleeps or
    in a container that is paused, nobody hangs.
    """
    limit = limits[0]
    stuck_s = silent_s = 0.0  # since the last progress, and since the last sign of life
    last = time.monotonic()
    while os.getppid() == parent:
        readable, _, _ = select.select([pipe], [], [], tick_s)
        now = time.monotonic()
        passed, last = min(now - last, 2 * tick_s), now
        stuck_s, silent_s = stuck_s + passed, silent_s + passed
        if readable:
            signs = os.read(pipe, 4096)
            if not signs:
                return ""
            silent_s = 0.0
            if PROGRESS in signs:
                stuck_s = 0.0
            for sign, of_phase in ((SERVING, limits[1]), (ENDING, limits[2])):
                if sign in signs:
                    limit, stuck_s = of_phase, 0.0
        if silent_s >= limit:
            return f"no sign of life for {silent_s:.1f} s: it is stopped, or its {what} is blocked"
        if stuck_s >= limit:
            return f"its {what} made no progress for {stuck_s:.1f} s while work waits"
    return ""


def _tell(service: str, pid: int, log_format: str, reason: str) -> None:
    """Write a line as the service's own log does (``log.py``). It is lost if stderr would block."""
    event, now = "hung, and killed by its watchdog", time.time()
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
    fields = {"reason": reason, "pid": pid, "event": event, "service": service, "level": "error"}
    line = json.dumps(fields | {"timestamp": timestamp})
    if log_format == "console":
        line = f"{timestamp} [error    ] {event} reason={reason!r} pid={pid} service={service}"
    with contextlib.suppress(OSError):  # such as a stderr that is closed
        if select.select([], [2], [], _WRITE_S)[1]:
            os.write(2, line.encode() + b"\n")


def main() -> None:
    """The program."""
    os.closerange(3, 4096)  # such as a socket that listens: it shall be closed when the service closes it
    os.setsid()  # neither Ctrl-C nor the end of the service's process group is for us
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    service, pid, log_format, what, boot_s, serving_s, end_s = sys.argv[1:]
    parent = int(pid)
    if reason := watch(0, parent, (float(boot_s), float(serving_s), float(end_s)), what):
        _tell(service, parent, log_format, reason)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
