"""Events that the step loop sends to streams, beside the core's deltas and loads."""

from dataclasses import dataclass
from typing import Any

from services.common.errors import TokaError
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler


@dataclass(frozen=True)
class Accepted:
    """The request is queued."""

    request: Request


@dataclass(frozen=True)
class Rejected:
    handle: int
    error: TokaError


@dataclass(frozen=True)
class HeartbeatReply:
    nonce: int


@dataclass(frozen=True)
class PlanEvent:
    """A plan, for watchers."""

    plan: PlannedStep
    waiting_sequences: int
    in_use_pages: int
    plans_in_flight: int

    @classmethod
    def of(cls, plan: PlannedStep, core: Scheduler) -> "PlanEvent":
        return cls(plan, len(core.state.queue.waiting), core.state.pool.pages.in_use, core.plans_in_flight)


# (sink, event): the event is a Delta or a class of this module. With a sink of None, all streams that want it get it.
Events = list[tuple[int | None, Any]]
