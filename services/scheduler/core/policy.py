"""What the operator chose."""

from dataclasses import dataclass

from services.scheduler.core.memory.hydragen import HydragenPolicy
from services.scheduler.core.request import AdmissionMode, Priority


@dataclass(frozen=True)
class Policy:
    """Flags of the scheduler, in the core's words."""

    steps_ahead: int = 2  # plans in flight, to begin with
    prefix_caching: bool = True
    max_queued: int = 65536  # samples
    mode: AdmissionMode = AdmissionMode.PREDICTED  # of requests that name none
    guaranteed_classes: frozenset[Priority] = frozenset()  # their requests are guaranteed unless they say otherwise
    margin: float = 1.0  # standard deviations of the pages in use that stay free for wrong predictions
    ageing_s: float = 30.0  # a class that waits rises by one for so many seconds; 0 = never
    hydragen: HydragenPolicy | None = None
    micro_batches: int = 1
