"""The load of the scheduler."""

import dataclasses
from dataclasses import dataclass, field

from services.scheduler.core.counters import Counters
from services.scheduler.core.future.admission import PageForecast
from services.scheduler.core.state import State


@dataclass(frozen=True)
class Load:
    """The load at one moment, named as in the contract."""

    running_sequences: int = 0
    waiting_sequences: int = 0
    total_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    in_use_pages: int = 0
    page_size: int = 0
    outstanding_tokens: int = 0
    ready: bool = False
    not_ready_reason: str = ""
    plans_in_flight: int = 0
    plans_ahead: int = 0
    step_ns: int = 0
    forecast: PageForecast = ()
    steps_by_tokens: tuple[int, ...] = ()
    counters: Counters = field(default_factory=Counters)


def read_load(
    state: State, *, not_ready_reason: str, plans_in_flight: int, step_s: float, forecast: PageForecast
) -> Load:
    """Return the load. Without a worker, all facts about it are 0.

    ``not_ready_reason`` is empty if the scheduler is ready. ``step_s`` is the recent duration of a step.
    """
    queue = state.queue
    load = Load(
        waiting_sequences=len(queue.waiting),
        outstanding_tokens=queue.waiting.tokens,
        ready=not not_ready_reason,
        not_ready_reason=not_ready_reason,
        steps_by_tokens=tuple(queue.steps_by_tokens),
        counters=dataclasses.replace(queue.counters),
    )
    if not state.attached:
        return load
    slots, pages = state.pool.slots, state.pool.pages
    return dataclasses.replace(
        load,
        running_sequences=slots.running,
        total_pages=pages.size,
        free_pages=pages.free,
        cached_pages=pages.cached,
        in_use_pages=pages.in_use,
        page_size=pages.page_size,
        outstanding_tokens=slots.outstanding_tokens() + queue.waiting.tokens,
        plans_in_flight=plans_in_flight,
        plans_ahead=queue.steps_ahead,
        step_ns=round(step_s * 1e9),
        forecast=forecast,
    )
