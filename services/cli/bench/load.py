"""A load: its requests, and the times at which they are sent."""

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np

from services.cli.bench.clients import Clients
from services.cli.bench.exchange import Endpoint, Reply
from services.cli.bench.sending import Bodies, ClientReport, Share

PERIOD_S = 0.25  # between reports of a client process
_ENDLESS = 2**40  # number of requests that is never reached


@dataclass(frozen=True)
class OfferedLoad:
    """The requests of ``body`` from number ``first``: sent at ``arrivals``, with a concurrency, or all at once."""

    body: Bodies
    count: int | None  # None: requests begin until ``seconds`` have passed
    first: int = 0
    arrivals: Sequence[float] | None = None  # seconds from the start, by request
    concurrency: int | None = None
    seconds: float | None = None  # time after which no request begins. Has no effect with arrivals

    def shares(self, clients: int) -> list[Share]:
        """Return the shares of ``clients`` processes, or of fewer if there are fewer requests."""
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
class LoadOutcome:
    """The replies to a load so far. Used by the thread that waits for it."""

    replies: list[tuple[int, Reply]] = field(default_factory=list)  # request numbers and replies, in order of the end
    busy: float = 0.0  # share of a core that the busiest client process used
    interrupted: bool = False
    _running: dict[int, int] = field(default_factory=dict)  # by client

    @property
    def running(self) -> int:
        """Number of requests without a whole reply."""
        return sum(self._running.values())

    def add(self, reports: list[ClientReport]) -> None:
        """Add the replies and the counts of new reports."""
        for report in reports:
            self.replies += report.replies
            self.busy = max(self.busy, report.busy or 0.0)
            self._running[report.client] = report.running


def drive(
    endpoint: Endpoint, load: OfferedLoad, clients: int, on_reports: Callable[[list[ClientReport], LoadOutcome], None]
) -> LoadOutcome:
    """Send a load and wait for its end, or for Ctrl-C. Call it in the main thread, since it handles SIGINT.

    ``on_reports`` is called with the new reports every 10 ms, even if there are none.
    """
    outcome = LoadOutcome()
    with _interrupts(outcome), Clients(endpoint, load.shares(clients), PERIOD_S) as processes:
        processes.begin()
        for reports in processes.reports():
            outcome.add(reports)
            on_reports(reports, outcome)
            if outcome.interrupted:
                break
    return outcome


@contextmanager
def _interrupts(outcome: LoadOutcome) -> Iterator[None]:
    """Record Ctrl-C in ``outcome``. An exception could interrupt the reading of a report."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        outcome.interrupted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def poisson(rate: float, rng: np.random.Generator, count: int | None, seconds: float | None) -> list[float]:
    """Return Poisson arrivals in seconds, at ``rate`` per second, up to ``count`` arrivals or up to ``seconds``.

    Raises ``ValueError`` if neither limit is given.
    """
    if count is None and seconds is None:
        raise ValueError("poisson() needs count or seconds")
    found: list[float] = []
    now = 0.0
    for _ in itertools.count() if count is None else range(count):
        now += rng.exponential(1 / rate)
        if seconds is not None and now >= seconds:
            break
        found.append(now)
    return found
