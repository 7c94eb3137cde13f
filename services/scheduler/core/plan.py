"""What goes to the worker and what comes back, as arrays: the core's side of the worker's contract."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.scheduler.core.request import SamplingSettings


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


@dataclass(frozen=True, eq=False)
class SlotAdmissions:
    """Sequences with the same tokens and settings enter slots."""

    token_ids: np.ndarray  # uint32, every token known
    prompt_tokens: int  # so many of them are the prompt, the others were generated before
    cached_tokens: int
    sampling: SamplingSettings
    slots: np.ndarray  # int64 [sequences]
    pages: np.ndarray  # int32 [sequences, pages], page tables so far
    sample_indices: list[int]
    traceparent: str = ""  # "": the request is not traced


@dataclass(eq=False)
class Plan:
    """One step. Empty arrays mean that nothing of the kind happens."""

    step: int
    released: list[int] = field(default_factory=list)  # slots
    admissions: list[SlotAdmissions] = field(default_factory=list)
    append_slots: np.ndarray = field(default_factory=no_slots)
    append_pages: np.ndarray = field(default_factory=no_slots)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source page, target page)
    # The batch in order; both None = as in the previous plan. `counts` None with `slots` given = one token each.
    slots: np.ndarray | None = None
    counts: np.ndarray | None = None
    parts: np.ndarray | None = None  # rows of each micro-batch, given with the batch; None = one
    # Hydragen groups; None = as in the previous plan, empty = none from now on.
    group_starts: np.ndarray | None = None  # int64, rows of the batch
    group_counts: np.ndarray = field(default_factory=no_slots)  # beside group_starts
    group_pages: np.ndarray = field(default_factory=no_slots)
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
    top_counts: np.ndarray = field(default_factory=no_slots)
    top_token_ids: np.ndarray = field(default_factory=no_tokens)  # concatenated
    top_logprobs: np.ndarray = field(default_factory=no_floats)
    failures: tuple[Failure, ...] = ()
    scored: tuple[tuple[int, Scored], ...] = ()  # (slot, prompt tokens)
    device_ns: int = 0  # the device worked on the step; 0 = not measured
    idle_ns: int = 0  # it had nothing to do before the step
