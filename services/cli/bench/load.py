"""A load: which requests, and when each is sent."""

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np

from services.cli.bench.clients import Clients
from services.cli.bench.exchange import Endpoint, Reply
from services.cli.bench.sending import Bodies, Report, Share

PERIOD_S = 0.25  # from one report of a client process to the next
_ENDLESS = 2**40  # requests


@dataclass(frozen=True)
class Load:
    """Requests ``first``, ``first + 1``... of ``body``: at their arrivals, ``concurrency`` at once, or all at once."""

    body: Bodies
    count: int | None  # None: until ``seconds`` have passed
    first: int = 0
    arrivals: Sequence[float] | None = None  # seconds from the start, one for each request
    concurrency: int | None = None
    seconds: float | None = None  # no request begins later; has no effect on arrivals

    def shares(self, clients: int) -> list[Share]:
        """For so many processes, or as many as there is work for."""
        count = _ENDLESS if self.count is None else self.count
        clients = min(clients, count, self.concurrency or count)
        shares = []
        for index in range(clients):
            numbers = range(self.first + index, self.first + count, clients)
            due = None if self.arrivals is None else self.arrivals[index::clients]
            at_once = None
            if self.concurrency is not None:
                at_once = len(range(index, self.concurrency, clients))
            shares.append(Share(numbers, self.body, due, at_once, self.seconds))
        return shares


@dataclass
class Outcome:
    """What is known of a load so far: that of the thread that waits for it."""

    replies: list[tuple[int, Reply]] = field(default_factory=list)  # by number, in the order in which they ended
    busy: float = 0.0  # share of a core that the busiest client process took
    interrupted: bool = False
    _running: dict[int, int] = field(default_factory=dict)  # by client

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return sum(self._running.values())

    def add(self, reports: list[Report]) -> None:
        for report in reports:
            self.replies += report.replies
            self.busy = max(self.busy, report.busy or 0.0)
            self._running[report.client] = report.running


def drive(
    endpoint: Endpoint, load: Load, clients: int, told: Callable[[list[Report], Outcome], None] = lambda *_: None
) -> Outcome:
    """Send a load and wait for its end, or for Ctrl-C. ``told`` is called at every look for reports, with those new.

    Of the main thread, whose signals it takes meanwhile."""
    outcome = Outcome()
    with _interrupts(outcome), Clients(endpoint, load.shares(clients), PERIOD_S) as processes:
        processes.begin()
        for reports in processes.reports():
            outcome.add(reports)
            told(reports, outcome)
            if outcome.interrupted:
                break
    return outcome


@contextmanager
def _interrupts(outcome: Outcome) -> Iterator[None]:
    """Ctrl-C is noted, and raises nothing: it may come in the middle of a report."""

    def note(number: int, frame: FrameType | None) -> None:
        outcome.interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def poisson(rate: float, rng: np.random.Generator, count: int | None, seconds: float | None) -> list[float]:
    """Seconds of arrivals at ``rate`` a second: ``count`` of them, or those before ``seconds``, what ends first."""
    if count is None and seconds is None:
        raise ValueError("arrivals without an end")
    found: list[float] = []
    now = 0.0
    for _ in itertools.count() if count is None else range(count):
        now += rng.exponential(1 / rate)
        if seconds is not None and now >= seconds:
            break
        found.append(now)
    return found
