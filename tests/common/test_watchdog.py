"""Who hangs is killed with a reason, and nobody else is."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from services.common.process import watchdog
from services.common.process.watchdog import ENDING, PROGRESS, SERVING, STUCK, watch
from tests.gateway.deployment import eventually

BEATING = [sys.executable, "-m", "tests.common.beating", "step_deadline=1"]
PATIENCE_S = 60


@contextlib.contextmanager
def beating(*flags: str) -> Iterator[subprocess.Popen]:
    """The service, from when it serves on."""
    with subprocess.Popen([*BEATING, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.stdout.readline() != "serving\n":
                assert process.poll() is None, process.stderr.read()
            yield process
        finally:
            process.kill()


def beats(process: subprocess.Popen, count: int) -> None:
    """Wait for so many. There are eight in a ``step_deadline``."""
    for _ in range(count):
        assert process.stdout.readline() == "beat\n"


def reason(process: subprocess.Popen) -> str:
    """Why it was killed."""
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL, errors
    line = json.loads(errors.splitlines()[-1])
    assert (line["event"], line["service"], line["level"]) == ("hung, and killed by its watchdog", "beating", "error")
    assert line["pid"] == process.pid
    return line["reason"]


def watchdogs(process: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has died
            if watchdog.__file__ in child.cmdline():
                found.append(child)
    return found


def only_watchdog(process: subprocess.Popen) -> psutil.Process:
    """Return the watchdog of ``process``, once the forked child runs the watchdog's program."""
    eventually(lambda: watchdogs(process))
    [found] = watchdogs(process)
    return found


def test_a_process_that_is_stopped_is_killed():
    with beating() as process:
        beats(process, 1)
        process.send_signal(signal.SIGSTOP)
        assert reason(process).startswith("no heartbeat for 1.")


def test_a_process_whose_event_loop_is_blocked_is_killed():
    with beating("manner=blocked") as process:
        assert reason(process).endswith("it is suspended, or its work is blocked")


def test_a_process_that_has_work_and_makes_no_progress_is_killed():
    with beating("manner=stuck") as process:
        assert reason(process).startswith("its work made no progress for 1.")


@pytest.mark.parametrize("manner", ["calm", pytest.param("slow", marks=pytest.mark.slow)])
def test_a_process_that_gets_on_lives_and_its_watchdog_ends_with_it(manner):
    with beating(f"manner={manner}") as process:
        own = only_watchdog(process)
        beats(process, 20)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "watchdog" not in errors
    eventually(lambda: not own.is_running() or own.status() == psutil.STATUS_ZOMBIE)


def test_a_process_that_hangs_is_killed_though_nobody_can_be_told():
    silent = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *BEATING, "manner=stuck"]
    assert subprocess.run(silent, timeout=PATIENCE_S, check=False).returncode == -signal.SIGKILL


def test_a_debugger_may_turn_it_off():
    with beating("manner=stuck", "watchdog=F") as process:
        assert watchdogs(process) == []


def test_a_watchdog_that_dies_is_replaced():
    with beating() as process:
        first = only_watchdog(process)
        first.kill()
        eventually(lambda: any(other.pid != first.pid for other in watchdogs(process)))
        beats(process, 12)
        process.send_signal(signal.SIGSTOP)
        assert "no heartbeat" in reason(process)


@pytest.mark.slow
def test_a_watchdog_that_is_stopped_is_replaced():
    with beating() as process:
        first = only_watchdog(process)
        eventually(lambda: os.getsid(first.pid) == first.pid)  # it is loaded, and next reads what there is
        beats(process, 2)
        first.suspend()
        eventually(lambda: [other.pid for other in watchdogs(process) if other.pid != first.pid])
        eventually(lambda: not first.is_running())
        beats(process, 12)
        process.send_signal(signal.SIGSTOP)
        assert "no heartbeat" in reason(process)


def test_a_watchdog_is_replaced_once_there_are_files_for_it_again():
    with beating() as process:
        service, first = psutil.Process(process.pid), only_watchdog(process)
        limits = service.rlimit(psutil.RLIMIT_NOFILE)
        service.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        first.kill()
        eventually(lambda: not first.is_running())
        beats(process, 4)
        service.rlimit(psutil.RLIMIT_NOFILE, limits)
        eventually(lambda: watchdogs(process))
        beats(process, 4)


def test_it_kills_nobody_but_its_parent():
    """The one that it was started for may have died, and its number be another's."""
    with beating() as other:
        command = [sys.executable, watchdog.__file__, "beating", str(other.pid), "json", "work", "0.1", "0.1", "0.1"]
        assert subprocess.run(command, stdin=subprocess.PIPE, timeout=PATIENCE_S, check=False).returncode == 0
        beats(other, 12)


@pytest.mark.slow
def test_who_was_stopped_together_with_its_watchdog_does_not_hang():
    """As a machine that sleeps, or a container that is paused."""
    with beating() as process:
        own = only_watchdog(process)
        own.suspend()
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)  # twice as long as it may be silent
        own.resume()
        process.send_signal(signal.SIGCONT)
        beats(process, 20)


@pytest.fixture
def watched():
    """``watch`` in a thread, over a pipe: (write, result)."""
    reading, writing = os.pipe()
    outcome: list[str] = []

    def begin(*limits: float) -> tuple[Callable[[bytes], int], Callable[[], str]]:
        thread = threading.Thread(
            target=lambda: outcome.append(watch(reading, os.getppid(), limits, "loop", 0.02)), daemon=True
        )
        thread.start()

        def result() -> str:
            thread.join(PATIENCE_S)
            return outcome[0]

        return lambda signs: os.write(writing, signs), result

    yield begin
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("phase", "limits"), [(b"", (0.2, 900, 900)), (SERVING, (900, 0.2, 900)), (SERVING + ENDING, (900, 900, 0.2))]
)
def test_each_phase_has_a_limit_of_its_own(watched, phase, limits):
    say, result = watched(*limits)
    say(PROGRESS + phase)
    assert result().startswith("no heartbeat for 0.2")


def test_signs_of_life_are_no_progress(watched):
    say, result = watched(0.5, 900, 900)
    said = threading.Event()

    def keep_saying() -> None:
        while not said.wait(0.02):
            say(STUCK)

    thread = threading.Thread(target=keep_saying, daemon=True)
    thread.start()
    try:
        assert result().startswith("its loop made no progress for 0.5")
    finally:
        said.set()
        thread.join()  # before its pipe is closed
