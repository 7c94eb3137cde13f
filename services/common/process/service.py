"""Starts and stops the process of a service."""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn, TypeVar

import structlog

from services.common.boundaries import errors_to
from services.common.config import ServiceFlags, from_command_line
from services.common.errors import TokaError
from services.common.host.descriptors import raise_limit
from services.common.host.private_files import keep_files_private
from services.common.process.children import use_safe_paths
from services.common.process.init import run_under_init
from services.common.process.log import configure
from services.common.process.relay import flush_output, relay_output

PARENT_PID = "TOKA_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_COLLECT_AFTER = 100_000
_COLLECT_OLDER_AFTER = (20, 20)  # collections of the next younger generation
_FEW_OBJECTS = 30_000  # collecting them takes less than 50 ms; an idle gateway has 10,000 to 20,000
_MOST_DELAYS = 60
_M_ARENA_MAX = -8  # of glibc's mallopt
_AT_ONCE_S = 2.0  # from the second signal to a forced exit
_service_name = ""  # set by run_service

log = structlog.get_logger(__name__)

K = TypeVar("K", bound=ServiceFlags)
R = TypeVar("R")


class Stop(asyncio.Event):
    """Event that is set when the process must stop: finish what runs, then exit.

    If ``at_once`` is set too, the process must not wait for what runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

    async def within(self, drain_s: float, done: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        """Wait for ``done()`` until ``drain_s`` seconds have passed or ``at_once`` is set. Return whether it completed.

        Raises the exception of ``done()``.
        """
        tasks = asyncio.create_task(done()), asyncio.create_task(self.at_once.wait())
        try:
            ended, _ = await asyncio.wait(tasks, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if tasks[0] in ended:
            tasks[0].result()
        return tasks[0] in ended


def run_service(name: str, kind: type[K], serve: Callable[[K, Stop], Coroutine[Any, Any, None]]) -> None:
    """Run the ``main()`` of a service: read flags, set up logs, run ``serve(config, stop)`` until it returns.

    The first SIGTERM or SIGINT sets ``stop``. The second sets ``stop.at_once`` too, and forces an exit two seconds
    later. If the parent process has exited, the first signal acts as the second. The exit status is 0 after a signal or
    a normal return, 2 for a wrong flag, otherwise that of the error, whose reason is logged. Writes to stdout and
    stderr never block.
    """
    global _service_name
    run_under_init()
    use_safe_paths()
    keep_files_private()
    _service_name = name
    config = from_command_line(kind)
    relay_output()
    faulthandler.enable()
    configure(name, config.log_level, config.log_format)
    exit_with_parent()
    raise_limit()
    try:
        asyncio.run(_until_signalled(config, serve))
    except TokaError as error:
        log.error("cannot continue", reason=error.message)
        sys.exit(error.exit_status)


async def _until_signalled(config: K, serve: Callable[[K, Stop], Coroutine[Any, Any, None]]) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set() or _is_orphan():
            if not stop.at_once.is_set():
                loop.call_later(_AT_ONCE_S, exit_now, 128 + number)
            stop.at_once.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await serve(config, stop)


def exit_now(status: int) -> NoReturn:
    """Exit with ``status`` without waiting for other threads. Buffered output is flushed."""
    flush_output()
    os._exit(status)


async def run_unless_stopped(work: Callable[[], R], stop: asyncio.Event) -> R | None:
    """Run ``work`` in a thread and return its result, or None as soon as ``stop`` is set.

    ``work`` may block for long, for example in a download. A thread cannot be interrupted, so it continues as a daemon
    thread, which does not keep the process from exiting.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(finish: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.cancelled() else finish(value))

    def run() -> None:
        with errors_to(partial(settle, done.set_exception)):
            settle(done.set_result, work())

    threading.Thread(target=run, daemon=True, name="work").start()
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((done, stopped), return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        stopped.cancel()
        done.cancel()


def service_name() -> str:
    """Return the name of the service, or an empty string in a process that ``run_service`` did not start."""
    return _service_name


def collect_seldom(after: int = _COLLECT_AFTER, *, older_after: tuple[int, int] = _COLLECT_OLDER_AFTER) -> None:
    """Run the cycle collector less often, and never examine the objects that exist now.

    Call it when a service is ready.

    Reference counts free nearly all memory. Searching the objects of thousands of requests for cycles takes a third of
    a gateway's time, and delays the steps of a scheduler. ``after`` is the number of new objects at which the youngest
    generation is examined. ``older_after`` are the last two arguments of ``gc.set_threshold``.

    It does nothing in a process that ``run_service`` did not start, such as a test.
    """
    if not _service_name:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(after, *older_after)


async def collect_every(seconds: float) -> None:
    """Free cycles of all generations, without end.

    It collects every ``seconds`` while few objects exist, else every 60th time. After ``collect_seldom``, cycles remain
    that survived a collection before they became garbage.
    """
    delays = 0
    while True:
        await asyncio.sleep(seconds)
        if collect_if_few():
            delays = 0
        elif (delays := delays + 1) >= _MOST_DELAYS:
            gc.collect()
            delays = 0


def collect_if_few(most_objects: int = _FEW_OBJECTS) -> bool:
    """Free cycles of all generations if the collector would examine at most ``most_objects``. Return whether it did.

    A collection blocks the event loop for 0.3 to 2 us for each object. Counting the objects takes a tenth of that.
    """
    if len(gc.get_objects()) > most_objects:
        return False
    gc.collect()
    return True


def share_arena() -> None:
    """Make all threads of this process allocate from one arena of glibc. Call it before gRPC starts its threads.

    By default, threads have separate arenas, up to eight for each processor. The memory of a gRPC call is often freed
    by another thread than it was allocated in, so each arena grows to the size of a burst, and no arena can use
    the freed memory of another. HTTP/2 streams that were opened and reset took a scheduler 740 MiB, of which 420 MiB
    were in use at a time. With two arenas they took 470 to 660 MiB, with one they take 430.

    It does nothing if ``MALLOC_ARENA_MAX`` is in the environment, or the C library is not glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    mallopt(_M_ARENA_MAX, 1)


def exit_with_parent() -> None:
    """On Linux, have the kernel send SIGTERM when the process that set ``TOKA_PARENT_PID`` exits, even by a crash."""
    parent = os.environ.get(PARENT_PID)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if _is_orphan():  # it exited before the call
        sys.exit(1)


def _is_orphan() -> bool:
    """Return whether the process that set ``TOKA_PARENT_PID`` has exited."""
    return os.getppid() != int(os.environ.get(PARENT_PID, os.getppid()))
