"""A step while it is planned, and what is wrong with a result."""

from dataclasses import dataclass, field

import numpy as np

from services.common.plan.types import Admission, Batch, Groups, Plan


class WrongAnswer(Exception):
    """The worker's result does not fit the plan."""


NO_SLOTS = np.zeros(0, np.int64)
NO_FLOATS = np.zeros(0, np.float32)
NO_TOKENS = np.zeros(0, np.uint32)


def no_slots() -> np.ndarray:
    return NO_SLOTS


def no_floats() -> np.ndarray:
    return NO_FLOATS


def no_tokens() -> np.ndarray:
    return NO_TOKENS


@dataclass(eq=False)
class PlannedStep:
    """A plan while it is built, and what observers read of it. Empty arrays mean that nothing of the kind happens."""

    step: int
    released: list[int] = field(default_factory=list)  # slots
    admissions: list[Admission] = field(default_factory=list)
    append_slots: np.ndarray = field(default_factory=no_slots)
    append_pages: np.ndarray = field(default_factory=no_slots)
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
    preempted_ids: list[str] = field(default_factory=list)  # of the released
    hydragen_groups: int = 0
    hydragen_rows: int = 0
    micro_batches: int = 1
    postponed: bool = False  # admissions wait for a later plan

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
