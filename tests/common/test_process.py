"""Signals end a service: first in good order, then at once."""

import asyncio
import gc
import signal
import subprocess
import sys
import weakref

import psutil
import pytest

from services.common.process import init
from services.common.process.service import PARENT_PID, Stop, collect_every, collect_if_few
from tests.common.test_watchdog import BEATING, PATIENCE_S, beating
from tests.gateway.deployment import eventually

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_the_first_signal_lets_it_end_in_good_order():
    with beating() as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def test_the_second_signal_ends_it_at_once():
    with beating("manner=clinging") as process:
        process.send_signal(signal.SIGTERM)
        while process.stdout.readline() != "stopping\n":
            pass
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_an_orphan_does_not_linger():
    """Its parent was killed: there is nobody to send the second signal."""
    script = f"""
import os, subprocess, sys
child = subprocess.Popen({[*BEATING, "manner=clinging"]!r}, env=os.environ | {{{PARENT_PID!r}: str(os.getpid())}})
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        while parent.stdout.readline() != "serving\n":
            assert parent.poll() is None
        [orphan] = psutil.Process(parent.pid).children()
        parent.kill()
        eventually(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)


async def test_who_drains_waits_until_it_is_done_or_late_or_hurried():
    async def never() -> None:
        await asyncio.Event().wait()

    async def done() -> None:
        return

    async def fails() -> None:
        raise ValueError("broken")

    stop = Stop()
    assert await stop.within(PATIENCE_S, done)
    assert not await stop.within(0.01, never)
    with pytest.raises(ValueError, match="broken"):
        await stop.within(PATIENCE_S, fails)
    asyncio.get_running_loop().call_soon(stop.at_once.set)
    assert not await stop.within(PATIENCE_S, never)


def run_behind_init(*command: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-I", "-S", init.__file__, *command], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_process_1_ends_as_its_child_does(code, status):
    with run_behind_init(sys.executable, "-c", f"import os, sys; {code}") as front:
        assert front.wait(PATIENCE_S) == status


def test_process_1_finds_its_command_as_a_shell_does():
    with run_behind_init("true") as front:
        assert front.wait(PATIENCE_S) == 0


def test_process_1_passes_signals_on():
    with run_behind_init(*BEATING) as front:
        while front.stdout.readline() != "serving\n":
            assert front.poll() is None
        front.send_signal(signal.SIGTERM)
        assert front.wait(PATIENCE_S) == 0


def test_a_signal_that_comes_while_a_service_is_loaded_is_not_lost():
    """Python has no handler for it yet, so a service that were process 1 itself would not see it."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process namespaces here")
    loading = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen([*UNSHARE, sys.executable, "-m", "services.common.process.init", *loading]) as namespace:
        descendants = psutil.Process(namespace.pid).children
        eventually(lambda: any("600" in child.cmdline()[-1:][0] for child in descendants(recursive=True)[1:]))
        descendants()[0].send_signal(signal.SIGTERM)
        assert namespace.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_a_service_that_would_be_process_1_gets_one_in_front_of_it():
    """The kernel would spare it the watchdog's SIGKILL."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process namespaces here")
    command = [*UNSHARE, *BEATING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as namespace:
        while namespace.stdout.readline() != "serving\n":
            assert namespace.poll() is None, namespace.stderr.read()
        front, service = psutil.Process(namespace.pid).children(recursive=True)[:2]
        assert init.__file__ in front.cmdline()
        assert "tests.common.beating" in service.cmdline()
        service.send_signal(signal.SIGSTOP)
        _, errors = namespace.communicate(timeout=PATIENCE_S)
        assert namespace.returncode == 128 + signal.SIGKILL
        assert "no heartbeat" in errors


@pytest.mark.slow
async def test_circles_are_freed_though_the_collector_waits_for_many():
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    freed = asyncio.Event()
    gc.disable()
    try:
        circle = Circle()
        known = weakref.ref(circle, lambda _: freed.set())
        gc.collect()  # it has lived for a while
        del circle
        assert known() is not None
        collecting = asyncio.create_task(collect_every(0.01))
        await asyncio.wait_for(freed.wait(), PATIENCE_S)
        collecting.cancel()
    finally:
        gc.enable()


def test_no_collection_examines_many_objects():
    objects = 1000
    gc.collect()
    gc.freeze()  # the test process has many objects of its own
    try:
        alive = [[number] for number in range(objects)]
        assert not collect_if_few(objects)
        del alive
        assert collect_if_few(objects)
    finally:
        gc.unfreeze()
