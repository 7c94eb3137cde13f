"""The load of the scheduler."""

from services.scheduler.core.future.admission import PageForecast
from services.scheduler.core.state import State
from tokasaurus.scheduler.v1 import observe_pb2


def read_load(
    state: State, *, not_ready_reason: str, plans_in_flight: int, step_s: float, forecast: PageForecast
) -> observe_pb2.Load:
    """Return the load. Without a worker, all facts about it are 0.

    ``not_ready_reason`` is empty if the scheduler is ready. ``step_s`` is the recent duration of a step.
    """
    queue = state.queue
    load = observe_pb2.Load(
        waiting_sequences=len(queue.waiting) - queue.waiting.parked,
        parked_sequences=queue.waiting.parked,
        outstanding_tokens=queue.waiting.tokens,
        ready=not not_ready_reason,
        not_ready_reason=not_ready_reason,
        paused=queue.pause is not None,
        asleep=queue.asleep,
        steps_by_tokens=queue.steps_by_tokens,
        counters=observe_pb2.Counters(**vars(queue.counters)),
    )
    if not state.attached:
        return load
    slots, pages = state.pool.slots, state.pool.pages
    load.running_sequences, load.plans_in_flight, load.plans_ahead = slots.running, plans_in_flight, queue.steps_ahead
    load.total_pages, load.free_pages = pages.size, pages.free
    load.cached_pages, load.in_use_pages, load.page_size = pages.cached, pages.in_use, pages.page_size
    load.outstanding_tokens += slots.outstanding_tokens()
    load.step_ns = round(step_s * 1e9)
    if forecast:
        load.forecast.total_pages = pages.size
        load.forecast.steps.extend(steps for steps, _ in forecast)
        load.forecast.pages.extend(count for _, count in forecast)
    return load
