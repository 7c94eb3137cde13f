"""Requests, their samples, and the sizes of a worker."""

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from services.common.errors import TokaError
from services.common.plan.types import SamplingSettings
from services.scheduler.core.stopping.automaton import Automaton

_FIXED_BYTES = 256  # numbers and trace id of an admission


class Priority(enum.IntEnum):
    """Priority classes of the waiting queue. The lowest value is served first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class AdmissionMode(enum.IntEnum):
    """Assumption about the length of a sequence when it is admitted. Numbered as in the contract."""

    PREDICTED = 1  # the predicted length; the sequence is preempted if pages run out
    GUARANTEED = 2  # the longest possible length; the sequence is never preempted


class FinishReason(enum.IntEnum):
    """Reason for the end of a sample. Numbered as in the contract."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5
    ABORTED = 6


class PauseMode(enum.IntEnum):
    """Treatment of accepted requests while the scheduler is paused. Numbered as in the contract."""

    KEEP = 1  # they stop where they are, and continue when the scheduler is resumed
    WAIT = 2  # they finish; requests that are accepted later wait
    ABORT = 3  # they end with the tokens that they have


@dataclass(eq=False)
class Request:
    """A request of a client. Only the core uses the fields from ``limit`` on."""

    request_id: str
    tokens: np.ndarray  # uint32: the prompt, and the resumed tail of an answer
    sampling: SamplingSettings
    max_tokens: int | None = None  # None: the rest of the context
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # with those of the model, unless the request ignores them
    automaton: Automaton | None = None  # of the stop strings
    n: int = 1
    priority: Priority = Priority.NORMAL
    deadline_ms: int | None = None  # milliseconds of the monotonic clock
    mode: AdmissionMode | None = None  # None: that of the policy
    length_class: str = ""  # label of requests with answers of similar length; "": by max_tokens
    fairness_key: str = ""  # requests of different keys share the worker equally
    cache_salt: str = ""
    traceparent: str = ""  # of the caller, for logs and spans
    traced: str = ""  # the traceparent of its own span, sent to the worker; "": not traced
    resumed_tokens: int = 0  # tokens at the end of ``tokens`` that another scheduler generated
    end_after: int | None = None  # number of completed samples after which the others end; None: never
    park_after: int | None = None  # number of completed samples after which the others are parked; None: never
    routed_start: int | None = None  # position of the first token whose experts are wanted; None: not asked
    first_sample_index: int = 0  # index of sample 0 in the sampling noise
    stop_state: int = 0  # state of the automaton after the resumed tail
    sink: int = 0  # destination of the output
    handle: int = 0  # of sample 0; sample i has handle + i
    scored: int = 0  # prompt tokens after the first with log-probabilities that were sent or are not wanted
    scorer: "Sample | None" = None  # the sample that was admitted last to compute the missing log-probabilities
    limit: int = 0  # greatest length of a sample, prompt included
    guaranteed: bool = True
    length_class_id: int = 0  # class of the length predictor
    cost: int = 1  # expected tokens of a sample, for fairness
    salt: Hashable = ""  # requests with different salts share no pages
    samples: list["Sample"] = field(default_factory=list)
    unfinished: int = 0  # samples without a Finish
    completed: int = 0  # samples that ended with STOP or LENGTH
    parked: bool = False  # its samples give up slots and pages to all samples that are not parked
    waiting: int = 0  # samples in the queue
    share: "PromptShare | None" = None

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt, without a resumed tail."""
        return len(self.tokens) - self.resumed_tokens

    @property
    def in_tail(self) -> bool:
        """True if there are several samples, of which at most a tenth, or one sample, has not ended."""
        return self.n > 1 and self.unfinished <= max(1, self.n // 10)

    @cached_property
    def admission_bytes(self) -> int:
        """An upper bound on the bytes of the admission of a new sample in a plan, without its pages."""
        parameters = self.sampling.parameters
        biases = 0 if parameters is None else len(parameters.logit_bias_token_ids)
        return _FIXED_BYTES + 4 * (len(self.tokens) + len(self.sampling.grammar)) + 8 * biases

    @property
    def unscored(self) -> bool:
        """True while wanted log-probabilities of the prompt are missing. Cached tokens have none."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.prompt_tokens - 1

    @property
    def being_scored(self) -> bool:
        """True while log-probabilities are missing that a sample in a slot computes. If it leaves, another one must."""
        return self.unscored and self.scorer is not None and self.scorer.slot >= 0


@dataclass(eq=False)
class PromptShare:
    """The pages of a prompt, computed by the first sample of a request and held for the samples that wait.

    The first sample is the leader. The pages are those of ``node`` in the prefix tree. If the prompt does not end at
    the end of a page, its last page is in addition: the other samples copy it. It belongs to the leader, or to the
    share after the leader has left.
    """

    leader: "Sample | None"  # None: it left its slot
    ready_step: int = 0  # first step whose plan may use the pages; 0 until it is known
    node: int = 0
    last_page: int = -1  # -1 = none
    owns_last_page: bool = False


class Sample:
    """An answer that is generated. While it has a slot, its current values are in ``Slots``."""

    __slots__ = (
        "accepted_ns", "arrival", "cached_tokens", "computed_before", "finished", "first_plan_ns", "first_token_ns",
        "generated", "handle", "index", "known", "last_token_ns", "losses", "losses_alone", "overtaken",
        "preempted_for_others", "preemptions", "reach", "request", "routed", "slot", "spans", "stop_state",
    )  # fmt: skip

    def __init__(self, request: Request, offset: int, arrival: int, accepted_ns: int) -> None:
        self.request = request
        self.handle = request.handle + offset
        self.index = request.first_sample_index + offset  # in the sampling noise
        self.arrival = arrival  # order of service within a class
        self.accepted_ns = accepted_ns
        self.slot = -1  # -1 while waiting
        self.finished = False
        self.generated = np.zeros(0, np.uint32)  # tokens after request.tokens, of an interrupted sample
        self.stop_state = request.stop_state  # local state of the automaton
        self.computed_before = 0  # tokens computed before the interruption
        self.known = len(request.tokens)  # tokens, as of its last release from a slot
        # For the quarantine: workers lost at this length, and those lost while the sample ran alone. ``reach`` is the
        # length that it would have had after the plans in flight.
        self.losses = self.losses_alone = self.reach = 0
        self.spans: tuple[WeightsSpan, ...] = ()  # its tokens until the last change of the weights
        # Position of the next token whose experts are wanted, since its last release from a slot; -1: not asked.
        self.routed = -1 if request.routed_start is None else request.routed_start
        self.preemptions = 0
        self.preempted_for_others = 0  # preemptions for a higher class or another key
        self.overtaken = 0  # samples that were admitted before it while it was the first and did not fit
        self.cached_tokens = -1  # -1 until first admitted
        self.first_plan_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0

    @property
    def tokens(self) -> np.ndarray:
        """All known tokens, uint32: the prompt, and the tokens generated before an interruption."""
        return np.concatenate((self.request.tokens, self.generated)) if len(self.generated) else self.request.tokens

    @property
    def given(self) -> int:
        """The number of known tokens."""
        return len(self.request.tokens) + len(self.generated)

    @property
    def guaranteed(self) -> bool:
        """True if it is never preempted. After two preemptions this holds for every sample, so that all complete.

        A parked sample is never guaranteed. The parked sample with the most work is preempted last, so all parked
        samples complete too.
        """
        return not self.request.parked and (self.request.guaranteed or self.preemptions >= 2)


class WeightsSpan(NamedTuple):
    """Consecutive tokens of a sample that the same weights generated."""

    version: str
    tokens: int


class Finish(NamedTuple):
    """The end of a sample, with the facts about it that are sent once."""

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
    error: TokaError | None = None  # with ERROR, and with CANCELLED by an operator
    spans: tuple[WeightsSpan, ...] = ()  # empty while the worker has the weights of its start
