"""How loaded the scheduler is, as numbers."""

import dataclasses
from dataclasses import dataclass, field

from services.scheduler.core.counters import Counters
from services.scheduler.core.future.summary import PageForecast
from services.scheduler.core.state import State


@dataclass(frozen=True)
class Load:
    """A snapshot, named as in the contract."""

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
    state: State, *, not_ready_reason: str, plans_in_flight: int, step_s: float = 0.0, forecast: PageForecast = ()
) -> Load:
    """The present load. ``not_ready_reason``: empty when it is ready; ``step_s``: recent time of a step."""
    ready = not not_ready_reason
    waiting, counters = len(state.queue.waiting), dataclasses.replace(state.queue.counters)
    if not state.attached:
        return Load(
            waiting_sequences=waiting,
            outstanding_tokens=state.queue.waiting.tokens,
            ready=ready,
            not_ready_reason=not_ready_reason,
            steps_by_tokens=tuple(state.queue.steps_by_tokens),
            counters=counters,
        )
    pool = state.pool.pages
    return Load(
        running_sequences=state.pool.slots.running,
        waiting_sequences=waiting,
        total_pages=pool.size,
        free_pages=pool.free,
        cached_pages=pool.cached,
        in_use_pages=pool.in_use,
        page_size=pool.page_size,
        outstanding_tokens=state.pool.slots.outstanding_tokens() + state.queue.waiting.tokens,
        ready=ready,
        not_ready_reason=not_ready_reason,
        plans_in_flight=plans_in_flight,
        plans_ahead=state.queue.steps_ahead,
        step_ns=round(step_s * 1e9),
        forecast=forecast,
        steps_by_tokens=tuple(state.queue.steps_by_tokens),
        counters=counters,
    )
