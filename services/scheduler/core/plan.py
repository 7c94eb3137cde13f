"""What goes to the worker and what comes back."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.plan.top_logprobs import TopLogprobs
from services.common.plan.types import Admission, Batch, Groups, Plan


class WrongAnswer(Exception):
    """A worker's answer is not one to what it was asked."""


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
    postponed: bool = False  # onboarding waits for a later plan

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


class Scored(NamedTuple):
    """Log-probabilities of consecutive prompt tokens."""

    start: int  # place of the first of them in the prompt
    logprobs: np.ndarray  # float32 [tokens]
    ranks: np.ndarray  # uint32, beside logprobs; 1 = most likely
    top_token_ids: np.ndarray  # uint32 [tokens * top]
    top_logprobs: np.ndarray  # float32, beside top_token_ids

    def behind(self, tokens: int) -> "Scored":
        """Without the first so many."""
        top = tokens * (len(self.top_token_ids) // len(self.logprobs))
        rest = self.logprobs[tokens:], self.ranks[tokens:], self.top_token_ids[top:], self.top_logprobs[top:]
        return Scored(self.start + tokens, *rest)


class Failure(NamedTuple):
    """A sequence that the worker could not compute."""

    slot: int
    message: str
    forbidden: bool = False  # its grammar does not allow what was generated before its admission


@dataclass(frozen=True, eq=False)
class Result:
    """A worker's answer to one plan. Arrays stand beside ``slots``; empty when nobody asked for them."""

    step: int
    slots: np.ndarray  # int64 [rows that sampled]
    tokens: np.ndarray  # int64
    logprobs: np.ndarray = field(default_factory=no_floats)  # float32, NaN where not asked
    top: TopLogprobs | None = None  # None when nobody asked
    failures: tuple[Failure, ...] = ()
    scored: tuple[tuple[int, Scored], ...] = ()  # (slot, prompt tokens)
    device_ns: int = 0  # the device worked on the step; 0 = not measured
    idle_ns: int = 0  # it had nothing to do before the step
