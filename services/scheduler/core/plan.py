"""The plan of a step while it is built."""

from dataclasses import dataclass, field

import numpy as np

from services.common.plan.types import Plan

NO_SLOTS = np.zeros(0, np.int64)
NO_FLOATS = np.zeros(0, np.float32)
NO_TOKENS = np.zeros(0, np.uint32)


@dataclass(eq=False)
class PlannedStep(Plan):
    """A plan while it is built, with facts for observers."""

    sequences: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    sampling: list[np.ndarray] = field(default_factory=list)  # slots of the rows that sample a token
    admitted_ids: list[str] = field(default_factory=list)
    released_ids: list[str] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)  # a part of released_ids
    hydragen_groups: int = 0
    hydragen_rows: int = 0
    micro_batches: int = 1
    postponed: bool = False  # samples wait that this plan did not try to admit
    follows: bool = False  # there has been work for the device since the plan before, so idle time is avoidable
