"""Events that the step loop sends to streams, beside the core's deltas and loads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.errors import TokaError
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler

Action = Callable[[Scheduler, int, list[int]], None]  # on the samples with these handles of a sink


@dataclass(frozen=True)
class Accepted:
    """The request is queued."""

    request: Request


@dataclass(frozen=True)
class Rejected:
    handle: int
    error: TokaError


@dataclass(frozen=True)
class PlanEvent:
    """A plan, for watchers."""

    plan: PlannedStep
    waiting_sequences: int
    in_use_pages: int
    plans_in_flight: int


# (sink, event): the event is a Delta, a class of this module, or a message of the contract (Load, Heartbeat). With a
# sink of None, all streams that want it get it.
Events = list[tuple[int | None, Any]]
