"""What is asked for, in the scheduler's own words: a request, and the samples it is made of."""

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.errors import TokaError
from services.common.plan.types import SamplingSettings
from services.scheduler.core.stopping.automaton import Automaton


class Priority(enum.IntEnum):
    """Classes of the waiting queue; the order of the enum is the order of service, lowest value first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class AdmissionMode(enum.IntEnum):
    """How long a sequence is taken to run when it is admitted; numbered as in the contract."""

    PREDICTED = 1  # as long as others of its class did; may be preempted when that was wrong
    GUARANTEED = 2  # to its limit: never preempted


class FinishReason(enum.IntEnum):
    """Numbered as in the contract."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5


@dataclass(eq=False)
class Request:
    """One accepted request. From ``limit`` on, its fields belong to the scheduler's core."""

    request_id: str
    tokens: np.ndarray  # [all tokens known at submission] uint32; a resumed tail included
    sampling: SamplingSettings
    max_tokens: int | None = None  # None: what is left of the context
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # the model's own set included unless it is ignored
    automaton: Automaton | None = None  # of the stop strings
    n: int = 1
    priority: Priority = Priority.NORMAL
    deadline_ms: int | None = None  # milliseconds of the monotonic clock
    mode: AdmissionMode | None = None  # None: the policy's
    length_class: str = ""  # requests whose answers are alike in length; "": those of like max_tokens
    fairness_key: str = ""  # who it is for
    cache_salt: str = ""
    traceparent: str = ""  # of the caller, for logs and spans
    traced: str = ""  # the traceparent of its own span, for the worker's; "": it is not traced
    resumed_tokens: int = 0  # tail of `tokens` that an earlier scheduler generated
    first_sample_index: int = 0  # what the noise of sample 0 is drawn for
    stop_state: int = 0  # of the automaton after the resumed tail
    sink: int = 0  # where the output goes: the owner of the handles
    handle: int = 0  # sample i answers to handle + i
    scored: int = 0  # prompt tokens, behind the first, whose log-probabilities were sent or are not wanted
    limit: int = 0  # length at which a sample ends
    guaranteed: bool = True
    length_class_id: int = 0  # of the length predictor
    cost: int = 1  # tokens that a sample is expected to take, for fairness
    salt: Hashable = ""  # of the prefix tree
    samples: list["Sample"] = field(default_factory=list)
    unfinished: int = 0  # samples without a Finish
    waiting: int = 0  # samples in the queue
    share: "PromptShare | None" = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt proper, without a resumed tail."""
        return len(self.tokens) - self.resumed_tokens

    @property
    def unscored(self) -> bool:
        """Log-probabilities of its prompt are still to come: cached tokens have none."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.prompt_tokens - 1


@dataclass(eq=False)
class PromptShare:
    """The prompt's pages, computed once by a request's first sample and held for the siblings still waiting.

    They are ``node`` of the prefix tree and, when the prompt does not end with a page, one page more, which siblings
    copy: the leader's own, or the share's when the leader is gone.
    """

    leader: "Sample | None"  # None: it has left
    ready_step: int = 0  # first step whose plan may use the pages; 0 while being computed
    node: int = 0
    last_page: int = -1  # -1 = none
    owns_last_page: bool = False


class Sample:
    """One answer in the making. The step path works on the slot arrays; this is its life before and after."""

    __slots__ = (
        "accepted_ns", "arrival", "cached_tokens", "computed_before", "finished", "first_plan_ns", "first_token_ns",
        "generated", "handle", "index", "known", "last_token_ns", "overtaken", "preemptions", "reach", "request",
        "slot", "stop_state", "strikes", "strikes_alone", "yields",
    )  # fmt: skip

    def __init__(self, request: Request, offset: int, arrival: int, accepted_ns: int) -> None:
        self.request = request
        self.handle = request.handle + offset
        self.index = request.first_sample_index + offset  # what the noise is drawn for
        self.arrival = arrival  # order of service within a class
        self.accepted_ns = accepted_ns
        self.slot = -1  # -1 while waiting
        self.finished = False
        self.generated = np.zeros(0, np.uint32)  # of an interrupted sample: tokens behind request.tokens
        self.stop_state = request.stop_state  # of the automaton, local numbering
        self.computed_before = 0  # tokens that were computed before the interruption
        self.known = len(request.tokens)  # tokens, when it left its slot last
        # Of the quarantine: lost workers since it was past `reach`, and how many of them while it ran alone; `reach` is
        # the length that it would have had, had the worker answered what it held.
        self.strikes = self.strikes_alone = self.reach = 0
        self.preemptions = 0
        self.yields = 0  # times that it made way for a higher class or another key
        self.overtaken = 0  # samples admitted before it while it was first and did not fit
        self.cached_tokens = -1  # -1 until first admitted
        self.first_plan_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0

    @property
    def tokens(self) -> np.ndarray:
        """Everything known: prompt and what was generated before an interruption."""
        return np.concatenate((self.request.tokens, self.generated)) if len(self.generated) else self.request.tokens

    @property
    def given(self) -> int:
        return len(self.request.tokens) + len(self.generated)

    @property
    def guaranteed(self) -> bool:
        """A sample that was preempted twice is guaranteed from then on: nothing is computed over and over."""
        return self.request.guaranteed or self.preemptions >= 2

    @property
    def cost(self) -> int:
        return self.request.cost

    @property
    def outstanding(self) -> int:
        """Prompt tokens to compute and answer tokens to generate at most."""
        return self.request.limit


class Finish(NamedTuple):
    """The end of one sample; everything about it that is sent once."""

    handle: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    queued_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    preemptions: int = 0
    stop_token_id: int | None = None
    stop_string: tuple[int, int] | None = None  # (index, trailing bytes)
    error: TokaError | None = None  # of reason ERROR, or CANCELLED by an operator


@dataclass(frozen=True)
class WorkerShape:
    """Sizes the worker announces; every limit of the core follows from them."""

    page_size: int
    page_count: int
    max_slots: int
    max_tokens_per_step: int
    max_context_tokens: int
    vocab_size: int
    max_top_logprobs: int = 20
    prompt_logprobs: bool = False
    grammars: bool = False
    hydragen: bool = True  # takes groups that share a prefix
    processed_logprobs: bool = False
    thinking_budgets: bool = False

    @property
    def max_running(self) -> int:
        """A sequence that decodes takes a token of every step, so no more run than a step has tokens."""
        return min(self.max_slots, self.max_tokens_per_step)

    @property
    def pool_tokens(self) -> int:
        return self.page_count * self.page_size
