"""Choices of the operator."""

from dataclasses import dataclass

from services.scheduler.core.memory.hydragen import HydragenPolicy
from services.scheduler.core.request import AdmissionMode, Priority


@dataclass(frozen=True)
class Policy:
    """Flags of the scheduler that concern the core."""

    steps_ahead: int = 2  # initial limit of plans in flight
    prefix_caching: bool = True
    max_queued: int = 65536  # samples
    mode: AdmissionMode = AdmissionMode.PREDICTED  # of requests without a mode
    guaranteed_classes: frozenset[Priority] = frozenset()  # the mode of their requests is GUARANTEED by default
    margin: float = 1.0  # free pages kept for wrong predictions, in standard deviations of the pages in use
    ageing_s: float = 30.0  # waiting time after which a class counts as the next higher class; 0 = never
    hydragen: HydragenPolicy | None = None
    micro_batches: int = 1
