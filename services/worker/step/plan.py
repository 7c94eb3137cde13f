"""A step as the runner sees it: what the scheduler decided, and what came of it. No wire types, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.thinking import ThinkingBudget


@dataclass(frozen=True)
class SamplingSettings:
    """Resolved: there are no defaults on this side of the wire."""

    temperature: float  # 0 = greedy
    top_p: float  # 1 = off
    top_k: int  # 0 = off
    min_p: float  # 0 = off
    seed: int  # 0 to 2**64 - 1
    sample_index: int
    logprobs: bool
    top_logprobs: int
    bias_token_ids: np.ndarray  # [n] int64
    bias_values: np.ndarray  # [n] float32
    repetition_penalty: float = 1.0  # 1 = off
    frequency_penalty: float = 0.0  # 0 = off
    presence_penalty: float = 0.0  # 0 = off
    prompt_logprobs: int | None = None  # of the prompt's tokens, and so many of the most likely ones; None = none
    grammar: str = ""  # that what is generated matches; empty = none
    processed_logprobs: bool = False  # of the distribution that the token was drawn from, not the model's own
    prompt_logprobs_start: int = 0  # position of the first prompt token to score; 0 means 1
    thinking: ThinkingBudget | None = None


@dataclass(frozen=True)
class Admission:
    """A sequence that takes a free slot."""

    slot: int
    token_ids: np.ndarray  # [known] int64
    cached_tokens: int  # the first so many are in `pages` already
    pages: np.ndarray  # [n] int64, in order
    sampling: SamplingSettings
    prompt_tokens: int = 0  # the first so many of token_ids are the prompt; 0 = all are


@dataclass(frozen=True)
class Batch:
    """The rows of a step, in order."""

    slots: np.ndarray  # [rows] int64, each once
    token_counts: np.ndarray  # [rows] int64


NO_ROWS = Batch(np.empty(0, np.int64), np.empty(0, np.int64))


def micro_batches(batch: Batch, rows: tuple[int, ...]) -> list[Batch]:
    """The parts of ``batch``, of ``rows`` rows each, in order, but for those that have none; no ``rows`` = one part."""
    if not rows:
        return [batch] if len(batch.slots) else []
    ends = np.cumsum(rows).tolist()
    runs = (slice(end - count, end) for count, end in zip(rows, ends, strict=True) if count)
    return [Batch(batch.slots[run], batch.token_counts[run]) for run in runs]


@dataclass(frozen=True)
class Groups:
    """Rows [starts[i], starts[i] + counts[i]) of the batch share the first prefix_pages[i] pages of their tables."""

    starts: np.ndarray  # [groups] int64
    counts: np.ndarray  # beside starts
    prefix_pages: np.ndarray  # beside starts

    def __len__(self) -> int:
        return len(self.starts)


NO_GROUPS = Groups(*[np.empty(0, np.int64)] * 3)


@dataclass(frozen=True)
class Plan:
    """Parts apply in the order of the fields: releases, admissions, appends, copies, then the forward pass."""

    step: int
    releases: np.ndarray  # [n] int64, slots
    admissions: tuple[Admission, ...]
    append_slots: np.ndarray  # [n] int64
    append_pages: np.ndarray  # beside append_slots
    copy_sources: np.ndarray  # [n] int64, pages
    copy_targets: np.ndarray  # beside copy_sources
    batch: Batch | None  # None = the previous plan's
    groups: Groups | None = None  # Hydragen groups; None = the previous plan's
    micro_batch_rows: tuple[int, ...] = ()  # rows of each micro-batch; empty = the step is not cut


@dataclass(frozen=True)
class Limits:
    """What a plan must fit into; the same numbers as in WorkerInfo."""

    page_size: int
    page_count: int
    max_slots: int
    max_tokens_per_step: int
    max_context_tokens: int
    vocab_size: int
    max_top_logprobs: int
    hydragen: bool = False  # whether plans may have groups
    max_micro_batches: int = 1  # parts that a step may be cut into
    grammars: bool = False  # whether sequences may have them

    @property
    def max_pages_per_slot(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_context_tokens // self.page_size)


@dataclass(frozen=True)
class Sampled:
    """What the rows that reached the end of their known tokens gave. Arrays are parallel to ``slots``."""

    slots: np.ndarray  # [n] int64, in batch order
    token_ids: np.ndarray  # [n] int64
    finite: np.ndarray  # [n] bool; where False the logits were not numbers and the token means nothing
    logprobs: np.ndarray | None = None  # [n] float32, NaN where not asked; None when no row asked
    top_counts: np.ndarray | None = None  # [n] int64; None when no row asked
    top_token_ids: np.ndarray | None = None  # [sum(top_counts)] int64, most likely first
    top_logprobs: np.ndarray | None = None  # beside top_token_ids


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of consecutive prompt tokens of one sequence."""

    slot: int
    start: int  # place in the sequence of the first of them
    logprobs: np.ndarray  # [n] float32
    ranks: np.ndarray  # [n] int64, 1 = the most likely token
    top_token_ids: np.ndarray  # [n, asked for] int64, most likely first
    top_logprobs: np.ndarray  # beside top_token_ids


@dataclass
class Timing:
    """Nanoseconds."""

    prepare: int = 0
    forward: int = 0
    sample: int = 0
    device: int = 0  # the device worked on the step; 0 = not measured, as `idle`
    idle: int = 0  # it had nothing to do since the step before


class Failure(NamedTuple):
    """Why a sequence fails whose logits are numbers."""

    message: str
    forbidden: bool = False  # its grammar does not allow what was generated before its admission


@dataclass(frozen=True)
class StepOutput:
    """One answer for one plan."""

    step: int
    sampled: Sampled
    timing: Timing = field(default_factory=Timing)
    scored: tuple[Scored, ...] = ()  # in batch order; a sequence may come in parts
    failures: Mapping[int, Failure] = field(default_factory=dict)  # by slot
