"""What the step loop tells the streams, beside the core's deltas and loads."""

from dataclasses import dataclass
from typing import Any

from services.common.errors import TokaError
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler


@dataclass(frozen=True)
class Accepted:
    """The request is in the queue."""

    request: Request


@dataclass(frozen=True)
class Rejected:
    handle: int
    error: TokaError


@dataclass(frozen=True)
class HeartbeatAnswer:
    nonce: int


@dataclass(frozen=True)
class PlanNews:
    """One plan, for those who watch."""

    plan: PlannedStep
    waiting_sequences: int
    in_use_pages: int
    plans_in_flight: int

    @classmethod
    def of(cls, plan: PlannedStep, core: Scheduler) -> "PlanNews":
        return cls(plan, len(core.state.queue.waiting), core.state.pool.pages.in_use, core.plans_in_flight)


# (sink, news): a Delta or one of the above; sink None = for everybody who wants that kind.
News = list[tuple[int | None, Any]]
