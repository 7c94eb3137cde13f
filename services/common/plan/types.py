"""A step plan: what the scheduler decided about one step. Numpy only; ``codec`` has the wire format."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from services.common.plan.routed_experts import RoutedExpertsLayout

if TYPE_CHECKING:  # the scheduler's core imports no messages
    from tokasaurus.common.v1.sampling_pb2 import Sampling


class SamplingSettings(NamedTuple):
    """Sampling settings of a request, resolved by the scheduler.

    A tuple, because it is made for every request, and a dataclass takes three times as long.
    """

    parameters: "Sampling | None" = None  # without a grammar, and never changed. None: the codec sends an empty message
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None  # most likely tokens listed for each prompt token; None = prompt is not scored
    grammar: str = ""  # the generated tokens match it; empty = none
    processed_logprobs: bool = False  # log-probabilities are of the distribution that the token was drawn from
    prompt_logprobs_start: int = 0  # position of the first prompt token to score; 0 means 1

    @property
    def wants_logprobs(self) -> bool:
        """True if results carry the log-probability of each token."""
        return self.logprobs or self.top_logprobs > 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes a free slot. Ids are unsigned 32-bit values of any integer dtype; the codec gives int64."""

    slot: int
    token_ids: np.ndarray  # [known]
    cached_tokens: int  # leading tokens whose keys and values `pages` hold already
    pages: np.ndarray  # [n], in order
    sampling: SamplingSettings
    prompt_tokens: int = 0  # leading tokens that are the prompt; 0 = all
    sample_index: int = 0  # noise is a function of (seed, sample_index, position)
    traceparent: str = ""  # W3C trace context; empty = the request is not traced
    routed_start: int | None = None  # position of the first token whose experts results carry; None = no token

    @property
    def prompt_length(self) -> int:
        """The number of leading tokens that are the prompt."""
        return self.prompt_tokens or len(self.token_ids)


@dataclass(frozen=True)
class Batch:
    """The rows of a step, in order."""

    slots: np.ndarray  # [rows] int64, each once
    token_counts: np.ndarray  # [rows] int64


NO_ROWS = Batch(np.empty(0, np.int64), np.empty(0, np.int64))


def micro_batches(batch: Batch, rows: tuple[int, ...]) -> list[Batch]:
    """Cut ``batch`` into parts of ``rows`` rows each, in order, and leave out empty ones. No ``rows`` = one part."""
    if not rows:
        return [batch] if len(batch.slots) else []
    ends = np.cumsum(rows).tolist()
    runs = (slice(end - count, end) for count, end in zip(rows, ends, strict=True) if count)
    return [Batch(batch.slots[run], batch.token_counts[run]) for run in runs]


@dataclass(frozen=True)
class Groups:
    """Hydragen groups.

    Rows [starts[i], starts[i] + counts[i]) of the batch share the first prefix_pages[i] pages of their tables.
    """

    starts: np.ndarray  # [groups] int64
    counts: np.ndarray  # beside starts
    prefix_pages: np.ndarray  # beside starts

    def __len__(self) -> int:
        return len(self.starts)


NO_GROUPS = Groups(*[np.empty(0, np.int64)] * 3)


def _none() -> np.ndarray:
    return NO_ROWS.slots


@dataclass(eq=False)
class Plan:
    """The plan of one step. Releases apply first, then admissions, appends and copies, then the forward pass."""

    step: int
    releases: np.ndarray = field(default_factory=_none)  # [n] int64, slots
    admissions: Sequence[Admission] = ()
    append_slots: np.ndarray = field(default_factory=_none)  # [n] int64
    append_pages: np.ndarray = field(default_factory=_none)  # beside append_slots
    copy_sources: np.ndarray = field(default_factory=_none)  # [n] int64, pages
    copy_targets: np.ndarray = field(default_factory=_none)  # beside copy_sources
    batch: Batch | None = None  # None = the previous plan's
    groups: Groups | None = None  # None = the previous plan's
    micro_batch_rows: tuple[int, ...] = ()  # rows of each micro-batch; empty = the step is one micro-batch


class LastPlan(NamedTuple):
    """The parts of the last plan that the next one may leave out."""

    step: int = 0
    batch: Batch = NO_ROWS
    groups: Groups = NO_GROUPS
    micro_batch_rows: tuple[int, ...] = ()  # of `batch`

    def followed_by(self, plan: Plan) -> "LastPlan":
        """Return what holds while ``plan`` runs."""
        groups = self.groups if plan.groups is None else plan.groups
        if plan.batch is None:
            return LastPlan(plan.step, self.batch, groups, self.micro_batch_rows)
        return LastPlan(plan.step, plan.batch, groups, plan.micro_batch_rows)


@dataclass(frozen=True)
class WorkerLimits:
    """The sizes and capabilities of a worker that plans must fit: the fields of the same names in ``WorkerInfo``."""

    page_size: int
    page_count: int
    max_slots: int
    max_tokens_per_step: int
    max_context_tokens: int
    vocab_size: int
    max_top_logprobs: int = 20
    hydragen: bool = False
    max_micro_batches: int = 1
    grammars: bool = False
    prompt_logprobs: bool = True
    processed_logprobs: bool = True
    thinking_budgets: bool = True
    window_tokens: int = 0
    routed_experts: RoutedExpertsLayout | None = None  # None = results carry no experts

    @property
    def max_running(self) -> int:
        """The most sequences that decode together. Each takes a token of every step."""
        return min(self.max_slots, self.max_tokens_per_step)

    @property
    def pool_tokens(self) -> int:
        """The number of tokens that the KV cache holds."""
        return self.page_count * self.page_size

    @property
    def max_pages_per_slot(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_context_tokens // self.page_size)

    def pages_left_behind(self, computed: np.ndarray) -> np.ndarray:
        """Return the number of leading pages that no layer reads again: int64 beside ``computed``.

        ``computed`` are the numbers of computed tokens of sequences. The next token reads the last ``window_tokens``
        tokens, itself included.
        """
        if not self.window_tokens:
            return np.zeros_like(computed)
        outside: np.ndarray = np.maximum(computed + 1 - self.window_tokens, 0)
        return outside // self.page_size

    @property
    def window_pages(self) -> int:
        """The most pages that a sequence needs to compute one token."""
        if not self.window_tokens:
            return self.max_pages_per_slot
        return min(-(-(self.window_tokens - 1) // self.page_size) + 1, self.max_pages_per_slot)

    @property
    def most_top_logprobs(self) -> int:
        """The most likely tokens that a row can ask for: no more than the vocabulary has."""
        return min(self.max_top_logprobs, self.vocab_size)
