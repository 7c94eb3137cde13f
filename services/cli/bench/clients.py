"""Client processes. Each sends a share of the requests, and all begin at the same moment.

The thread that measures spawns them and receives their reports.
"""

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

from services.cli.bench.exchange import Endpoint, Reply
from services.cli.bench.sending import ClientReport, Share, send_share
from services.common.boundaries import undo_on_error
from services.common.host.descriptors import raise_limit

_START_S = 60.0  # timeout for a client process to start
_SETTLE_S = 0.1  # from the last client's readiness to the moment when all begin
_POLL_S = 0.01  # timeout of one wait for reports


class ClientError(Exception):
    """A client process did not start, failed, or was killed."""


class Clients:
    """The client processes of one load, which run while the context is open."""

    def __init__(self, endpoint: Endpoint, shares: Sequence[Share], period_s: float | None = None) -> None:
        """Create the processes' tasks.

        A process reports every ``period_s`` seconds. None: only at its end, so that reports cost no time meanwhile.
        """
        self._tasks = [(index, endpoint, share, period_s) for index, share in enumerate(shares)]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._open: list[Connection] = []

    def __enter__(self) -> "Clients":
        raise_limit()
        with undo_on_error(self._end):
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def begin(self) -> None:
        """Start all processes at the same moment."""
        start = time.perf_counter() + _SETTLE_S
        for pipe in self._pipes:
            pipe.send(start)
        self._open = list(self._pipes)

    def reports(self) -> Iterator[list[ClientReport]]:
        """Yield new reports, or an empty list every 10 ms, until all processes have ended. Raises ``ClientError``."""
        while self._open:
            received = []
            for pipe in wait(self._open, timeout=_POLL_S):
                assert isinstance(pipe, Connection)
                received.append(self._receive(pipe))
            yield received

    def _receive(self, pipe: Connection) -> ClientReport:
        try:
            report: ClientReport = pipe.recv()
        except EOFError:
            report = ClientReport(self._pipes.index(pipe), trouble="it was killed")
        if report.trouble:
            raise ClientError(f"a client process failed: {report.trouble}")
        if report.busy is not None:
            self._open.remove(pipe)
        return report

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # otherwise the first process starts it and unblocks SIGINT
        # Ctrl-C reaches every process of a terminal. Only the process that prints the figures handles it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in self._tasks:
                own_end, other_end = context.Pipe()
                process = context.Process(target=send_share, args=(other_end,), daemon=True)
                process.start()
                other_end.close()
                self._pipes.append(own_end)
                self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for pipe, task in zip(self._pipes, self._tasks, strict=True):
            pipe.send(task)
        for pipe in self._pipes:
            if not pipe.poll(_START_S):
                raise ClientError("a client process did not start in time")
            self._receive(pipe)

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def makespan(replies: Sequence[Reply]) -> float:
    """Return the seconds from the first request to the end of the last reply."""
    return max(reply.ended_at for reply in replies) - min(reply.sent_at for reply in replies)
