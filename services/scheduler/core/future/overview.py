"""Overview of the unfinished requests, with estimates of their starts and finishes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.scheduler.core.future.estimate import Placement, running_steps
from services.scheduler.core.request import Request
from services.scheduler.core.state import State

_MOST_READ = 512  # waiting samples; to place a sample takes some microseconds, and the step loop waits meanwhile


@dataclass(eq=False)
class OverviewEntry:
    """An unfinished request. Steps count from now. ``finish`` is that of the last sample that was read."""

    request: Request
    age_ns: int
    running: int = 0  # samples
    generated: int = 0  # tokens of samples that run or wait
    start: int | None = None
    finish: int = 0

    def add(self, first: int, last: int, generated: int) -> None:
        """Add samples with the steps of their ``first`` and ``last`` token and the number of generated tokens."""
        self.start = first if self.start is None else min(self.start, first)
        self.finish = max(self.finish, last)
        self.generated += generated


class Overview(NamedTuple):
    """The core at one moment."""

    # Running requests by expected finish, then waiting requests in the order of service. If there are too many, the
    # running requests with the earliest end of a sample are listed.
    entries: list[OverviewEntry]
    unfinished: int  # requests, with and without an entry
    curve: np.ndarray  # int64, pages in use at steps 0, 1, ...


def read_overview(state: State, most: int, now_ns: int) -> Overview:
    """Return at most ``most`` requests. With thousands of sequences this takes some milliseconds."""
    entries = _running(state, most, now_ns)
    running = sorted(entries.values(), key=lambda entry: entry.finish)
    placement = Placement(state)
    queue = state.in_order(_MOST_READ)
    for sample, first, last in placement.place(queue) if queue else ():
        request = sample.request
        if request not in entries:
            if len(entries) == most or request.waiting < request.unfinished:
                continue  # a request that runs too, and did not fit into the list
            entries[request] = OverviewEntry(request, now_ns - request.samples[0].accepted_ns)
        entries[request].add(first, last, sample.given - request.prompt_tokens)
    return Overview([*running, *list(entries.values())[len(running) :]], len(state.queue.requests), placement.pages)


def _running(state: State, most: int, now_ns: int) -> dict[Request, OverviewEntry]:
    """Return the running requests with the earliest end of a sample, without their waiting samples."""
    slots, active = state.pool.slots, state.pool.slots.running_slots()
    first, last = running_steps(state, active)
    entries: dict[Request, OverviewEntry] = {}
    for sample in slots.samples[active[np.argsort(last, kind="stable")]].tolist():
        request = sample.request
        if request in entries:
            continue
        if len(entries) == most:
            break
        own = np.array([each.slot for each in request.samples if each.slot >= 0 and not each.finished])
        entry = entries[request] = OverviewEntry(request, now_ns - request.samples[0].accepted_ns, len(own))
        at = np.searchsorted(active, own)
        entry.add(int(first[at].min()), int(last[at].max()), int((slots.known[own] - slots.prompt[own]).sum()))
    return entries
