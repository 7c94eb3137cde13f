"""Everything that is not finished at one moment, and when it will be: for whoever looks at the whole."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.scheduler.core.future.estimate import Placement
from services.scheduler.core.request import Request
from services.scheduler.core.state import State

_LOOKED_AT = 512  # waiting samples: to place one takes some microseconds, and the step loop waits meanwhile


@dataclass(eq=False)
class Entry:
    """One request. Steps count from now; ``finish`` is that of its last sample, of those that were looked at."""

    request: Request
    age_ns: int
    running: int = 0
    generated: int = 0  # tokens of samples that run or wait
    start: int | None = None
    finish: int = 0

    def add(self, begins: int, ends: int, generated: int) -> None:
        """Some of its samples: the first token of them, the last, and how many there are."""
        self.start = begins if self.start is None else min(self.start, begins)
        self.finish = max(self.finish, ends)
        self.generated += generated


class Overview(NamedTuple):
    """Of the core at one moment."""

    # Those that run, as far as they are listed those of which a sample ends first, by expected finish; then those that
    # wait, in the order of service.
    entries: list[Entry]
    unfinished: int  # requests, however many have an entry
    curve: np.ndarray  # int64, pages in use at steps 0, 1, ...


def look_over(state: State, most: int, now_ns: int) -> Overview:
    """At most ``most`` requests. It takes some milliseconds when thousands of sequences run: not for every step."""
    entries = _running(state, most, now_ns)
    running = sorted(entries.values(), key=lambda entry: entry.finish)
    placement = Placement(state)
    queue = state.in_order(_LOOKED_AT)
    for sample, begins, ends in placement.place(queue) if queue else ():
        request = sample.request
        if request not in entries:
            if len(entries) == most or request.waiting + _finished(request) < len(request.samples):
                continue  # it runs, too, and is behind those that are listed
            entries[request] = Entry(request, _age(request, now_ns))
        entries[request].add(begins, ends, sample.given - request.prompt_tokens)
    return Overview([*running, *list(entries.values())[len(running) :]], len(state.queue.requests), placement.pages)


def _running(state: State, most: int, now_ns: int) -> dict[Request, Entry]:
    """Of the requests that run those of which a sample ends first, without their waiting samples."""
    slots, active = state.pool.slots, state.pool.slots.running_slots()
    to_prefill = np.maximum(slots.given - slots.scheduled, 0)
    begins = np.where(slots.known > slots.given, 0, 1 + to_prefill // state.pool.shape.max_tokens_per_step)
    ends = begins + np.maximum(slots.total - slots.known, 0)
    generated = slots.known - slots.prompt
    entries: dict[Request, Entry] = {}
    for sample in slots.samples[active[np.argsort(ends[active], kind="stable")]].tolist():
        request = sample.request
        if request in entries:
            continue
        if len(entries) == most:
            break
        own = np.array([each.slot for each in request.samples if each.slot >= 0 and not each.finished])
        entry = entries[request] = Entry(request, _age(request, now_ns), len(own))
        entry.add(int(begins[own].min()), int(ends[own].max()), int(generated[own].sum()))
    return entries


def _finished(request: Request) -> int:
    return len(request.samples) - request.unfinished


def _age(request: Request, now_ns: int) -> int:
    return now_ns - request.samples[0].accepted_ns
