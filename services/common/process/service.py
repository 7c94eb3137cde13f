"""How a service's process begins and ends."""

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
from typing import Any, NoReturn, TypeVar

import structlog

from services.common.config import ServiceFlags, from_command_line
from services.common.errors import TokaError
from services.common.host.descriptors import raise_limit
from services.common.host.private_files import keep_files_private
from services.common.process.children import use_safe_paths
from services.common.process.init import stand_in_front
from services.common.process.log import configure
from services.common.process.relay import last_words, relay_output

PARENT_PID = "TOKA_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_COLLECT_AFTER = 100_000
_COLLECT_OLDER_AFTER = (20, 20)  # times that younger ones were looked at
_FEW_OBJECTS = 30_000  # collecting them takes less than 50 ms; an idle gateway has 10,000 to 20,000
_MOST_DELAYS = 60
_M_ARENA_MAX = -8  # of glibc's mallopt
_AT_ONCE_S = 2.0  # to end in good order after the second signal
_own_name = ""  # of the service whose process this is, begun by run_service

log = structlog.get_logger(__name__)

K = TypeVar("K", bound=ServiceFlags)
R = TypeVar("R")


class Stop(asyncio.Event):
    """Set when the process shall end, in good order and after what runs. ``at_once``: it shall not wait for that."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

    async def within(self, drain_s: float, done: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        """Wait for ``done()``, for ``drain_s`` seconds at most and while it need not be at once: whether it came.
        Raises what it raises."""
        waits = asyncio.create_task(done()), asyncio.create_task(self.at_once.wait())
        try:
            ended, _ = await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if waits[0] in ended:
            waits[0].result()
        return waits[0] in ended


def run_service(name: str, kind: type[K], serve: Callable[[K, Stop], Coroutine[Any, Any, None]]) -> None:
    """The ``main()`` of a service: read flags, set up logs, run ``serve(config, stop)`` until it returns.

    ``stop`` is set at the first SIGTERM or SIGINT; ``serve`` then ends in good order. At the second it is to end at
    once, and has two seconds; so it is at the first when who started it has died. Exit status: 0 after a signal or a
    normal return, 2 for a wrong flag, the error's own with the reason in the log for anything else. Nothing that it
    writes to stdout and stderr makes it wait.
    """
    global _own_name
    stand_in_front()
    use_safe_paths()
    keep_files_private()
    _own_name = name
    config = from_command_line(kind)
    relay_output()
    faulthandler.enable()
    configure(name, config.log_level, config.log_format)
    die_with_parent()
    raise_limit()
    try:
        asyncio.run(_until_signalled(config, serve))
    except TokaError as error:
        log.error("cannot go on", reason=error.message)
        sys.exit(error.exit_status)


async def _until_signalled(config: K, serve: Callable[[K, Stop], Coroutine[Any, Any, None]]) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()

    def signalled(number: int) -> None:
        if stop.is_set() or _is_orphan():
            if not stop.at_once.is_set():
                loop.call_later(_AT_ONCE_S, end_now, 128 + number)
            stop.at_once.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    await serve(config, stop)


def end_now(status: int) -> NoReturn:
    """Exit with ``status`` whatever runs in the process. What it has written is flushed."""
    last_words()
    os._exit(status)


async def unless_stopped(work: Callable[[], R], stop: asyncio.Event) -> R | None:
    """The result of ``work``, which may block for long, such as a download; None as soon as ``stop`` is set.

    A thread cannot be interrupted: it is left behind, as a daemon that does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(finish: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if done.cancelled() else finish(value))

    def run() -> None:
        try:
            settle(done.set_result, work())
        except Exception as error:
            settle(done.set_exception, error)

    threading.Thread(target=run, daemon=True, name="work").start()
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((done, stopped), return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        stopped.cancel()
        done.cancel()


def own_name() -> str:
    """Of the service whose process this is; empty in others, such as tests, which have more to do."""
    return _own_name


def collect_seldom(after: int = _COLLECT_AFTER, *, older_after: tuple[int, int] = _COLLECT_OLDER_AFTER) -> None:
    """Run the cycle collector less often, and never examine the objects that exist now.

    Call it when a service is ready.

    Nearly all memory is freed by reference counts. Looking for cycles among the objects of thousands of requests takes
    a gateway a third of its time, and delays the steps of a scheduler. ``after``: number of objects made and not freed
    at which the youngest are examined. ``older_after``: the last two numbers for ``gc.set_threshold``.

    It does nothing in a process that ``run_service`` did not start, such as a test: such a process has other objects.
    """
    if not _own_name:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(after, *older_after)


async def collect_every(seconds: float) -> None:
    """Free cycles of all ages, for ever. Collect every ``seconds`` while few objects exist, else every 60th time.

    After ``collect_seldom``, cycles remain that had survived a collection before they became garbage.
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
    """Free cycles of all ages if the collector would examine at most ``most_objects``. Return whether it did.

    A collection blocks the event loop for 0.3 to 2 us for each object; counting them takes a tenth of that.
    """
    if len(gc.get_objects()) > most_objects:
        return False
    gc.collect()
    return True


def share_arena() -> None:
    """Let all threads of this process allocate from one arena of glibc. Call it before gRPC starts its threads.

    By default, threads have separate arenas, up to eight for each processor. The memory of a gRPC call is often freed
    by another thread than the one that allocated it, so each arena grows to the size of a burst, and no arena can use
    the freed memory of another. HTTP/2 streams that were opened and reset took a scheduler 740 MiB, of which
    420 MiB were in use at a time. With two arenas they took 470 to 660 MiB, with one they take 430.
    It does nothing if ``MALLOC_ARENA_MAX`` is in the environment, or the C library is not glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    mallopt(_M_ARENA_MAX, 1)


def die_with_parent() -> None:
    """On Linux, ask for SIGTERM when the process that set ``TOKA_PARENT_PID`` dies, however it dies."""
    parent = os.environ.get(PARENT_PID)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if _is_orphan():  # it died before we asked
        sys.exit(1)


def _is_orphan() -> bool:
    """Who set ``TOKA_PARENT_PID`` has died."""
    return os.getppid() != int(os.environ.get(PARENT_PID, os.getppid()))
