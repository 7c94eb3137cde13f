"""Watchdog of a service: a small child process that kills the service when it hangs.

``services.common.process.watchdog_client`` runs this file alone:
``watchdog.py SERVICE PID FORMAT WHAT BOOT_S STEP_S END_S``.

Its stdin is a pipe on which the service sends heartbeats, one byte each. It exits at the end of the pipe, or when PID
is no longer its parent: it kills no other process. FORMAT is that of its log line, json or console.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time

PROGRESS = b"."  # work was done since the last heartbeat, or there is none to do
STUCK = b"-"  # there is work, and none was done
SERVING = b"s"  # the second limit applies from now on
ENDING = b"e"  # the third limit applies from now on

_TICK_S = 0.25
_WRITE_S = 0.5  # limit for writing the log line


def watch(pipe: int, parent: int, limits: tuple[float, float, float], what: str, tick_s: float = _TICK_S) -> str:
    """Block until the service ``parent`` makes no progress within the limit of its phase (boot, serving, end).

    Returns the reason, or an empty string if the service has exited. Only time during which this process itself was
    running counts, so a machine that sleeps or a container that is paused is no hang.
    """
    limit = limits[0]
    stuck_s = silent_s = 0.0  # since the last progress, and since the last heartbeat
    last = time.monotonic()
    while os.getppid() == parent:
        readable, _, _ = select.select([pipe], [], [], tick_s)
        now = time.monotonic()
        passed, last = min(now - last, 2 * tick_s), now
        stuck_s, silent_s = stuck_s + passed, silent_s + passed
        if readable:
            received = os.read(pipe, 4096)
            if not received:
                return ""
            silent_s = 0.0
            if PROGRESS in received:
                stuck_s = 0.0
            for phase, phase_limit in ((SERVING, limits[1]), (ENDING, limits[2])):
                if phase in received:
                    limit, stuck_s = phase_limit, 0.0
        if silent_s >= limit:
            return f"no heartbeat for {silent_s:.1f} s: it is suspended, or its {what} is blocked"
        if stuck_s >= limit:
            return f"its {what} made no progress for {stuck_s:.1f} s although work is queued"
    return ""


def _log(service: str, pid: int, log_format: str, reason: str) -> None:
    """Write a line in the format of the service's log (``log.py``). It is lost if stderr would block."""
    event, now = "hung, and killed by its watchdog", time.time()
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
    fields = {"reason": reason, "pid": pid, "event": event, "service": service, "level": "error"}
    line = json.dumps(fields | {"timestamp": timestamp})
    if log_format == "console":
        line = f"{timestamp} [error    ] {event} reason={reason!r} pid={pid} service={service}"
    with contextlib.suppress(OSError):  # for example, stderr is closed
        if select.select([], [2], [], _WRITE_S)[1]:
            os.write(2, line.encode() + b"\n")


def main() -> None:
    """Run the watchdog of the parent process."""
    os.closerange(3, 4096)  # inherited sockets must close when the service closes them
    os.setsid()  # ignore Ctrl-C and signals to the service's process group
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    service, pid, log_format, what, boot_s, serving_s, end_s = sys.argv[1:]
    parent = int(pid)
    if reason := watch(0, parent, (float(boot_s), float(serving_s), float(end_s)), what):
        _log(service, parent, log_format, reason)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
