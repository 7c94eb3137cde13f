"""The plan of a step while it is built."""

from dataclasses import dataclass, field

import numpy as np

from services.common.plan.types import Admission, Batch, Groups, Plan

NO_SLOTS = np.zeros(0, np.int64)
NO_FLOATS = np.zeros(0, np.float32)
NO_TOKENS = np.zeros(0, np.uint32)


@dataclass(eq=False)
class PlannedStep:
    """A plan while it is built, with facts for observers. Empty arrays and lists mean that there are no entries."""

    step: int
    released: list[int] = field(default_factory=list)  # slots
    admissions: list[Admission] = field(default_factory=list)
    append_slots: np.ndarray = field(default_factory=lambda: NO_SLOTS)  # int64
    append_pages: np.ndarray = field(default_factory=lambda: NO_SLOTS)  # beside append_slots
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source page, target page)
    batch: Batch | None = None  # None = as in the previous plan
    groups: Groups | None = None  # None = as in the previous plan
    micro_batch_rows: tuple[int, ...] = ()  # given with the batch
    # For observers.
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

    def to_plan(self) -> Plan:
        """Return the plan that the worker gets."""
        sources, targets = np.array(self.copies, np.int64).reshape(-1, 2).T
        return Plan(
            self.step,
            np.array(self.released, np.int64),
            tuple(self.admissions),
            self.append_slots,
            self.append_pages,
            sources,
            targets,
            self.batch,
            self.groups,
            self.micro_batch_rows,
        )
