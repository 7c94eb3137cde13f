"""Requests as the engine sees them, independent of HTTP. The scheduler gets ``Settings.sampling`` as it is."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal

import numpy as np

from services.common.plan.routed_experts import RoutedExpertsLayout
from tokasaurus.common.v1.sampling_pb2 import Sampling

GrammarKind = Literal["json_schema", "regex", "choices", "lark"]  # as in the scheduler's contract
NO_TOKENS = np.zeros(0, np.uint32)


class RequestPriority(Enum):
    """Priority class of a request."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True)
class Grammar:
    """Grammar that the whole answer must match."""

    kind: GrammarKind
    value: str | tuple[str, ...]  # a tuple for ``choices``
    field: str  # request parameter that the grammar comes from
    composed: bool = False  # built by the gateway from several parameters

    @property
    def text(self) -> str:
        """The grammar's text. Raises ``TypeError`` for kind ``choices``, which has several."""
        if not isinstance(self.value, str):
            raise TypeError(f"a grammar of {self.kind} has several texts")
        return self.value

    @cached_property
    def size(self) -> int:
        """Size of the grammar's texts in bytes."""
        return sum(len(text.encode()) for text in ([self.value] if isinstance(self.value, str) else self.value))


@dataclass(frozen=True)
class Settings:
    """Settings that all prompts of one HTTP request share. ``None`` means the model's default."""

    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)  # without seed and grammar; never changed
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    end_after: int | None = None  # finished samples of a prompt after which the others end; None: never
    park_after: int | None = None  # finished samples of a prompt after which the others are parked; None: never
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None  # score the prompt, with this number of top tokens per position
    prompt_logprobs_start: int = 0  # position of the first prompt token to score
    processed_logprobs: bool | None = (
        None  # score the sampling distribution, not the raw logits; None: the server's default
    )
    routed_experts: RoutedExpertsLayout | None = None  # layout of a token's experts; None: not wanted
    routed_experts_start: int = 0  # position of the first token whose experts are wanted
    grammar: Grammar | None = None
    priority: RequestPriority = RequestPriority.NORMAL
    cache_salt: str = ""
    traceparent: str = ""  # W3C trace context of the caller
    fairness_key: str = ""  # the scheduler divides service fairly between keys
    deadline_ms: int | None = None  # milliseconds of the monotonic clock
    # The remaining settings concern the gateway only. They are not sent to the scheduler.
    include_stop: bool = False  # keep the stop string or stop token in the answer
    special_tokens: bool = False  # keep special tokens in the text
    return_token_ids: bool = False
    packed_logprobs: bool = False  # return log-probabilities in the fingerprint instead of beside the text
    requested_prompt_logprobs: int | None = None  # as the client asked; ``prompt_logprobs`` may also serve an echo
    open_ended: bool = False  # the client gave no limit for the answer
    discard_output: bool = False  # max_tokens is 0: schedulers generate at least one token, which is dropped


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt, and everything that a scheduler needs to generate ``settings.n`` samples of it."""

    request_id: str
    model: str
    prompt_ids: np.ndarray  # uint32 [prompt_tokens], at least one
    max_tokens: int  # per sample; prompt and answer fit into the context
    seed: int | None  # unsigned 64 bits
    settings: Settings


@dataclass(frozen=True, eq=False, slots=True)
class Submission:
    """The content of a Submit message: consecutive samples of one prompt.

    The first submission has all samples of the prompt. After a failover, each submission has some unfinished samples.
    """

    prompt: PromptRequest
    seed: int  # of the prompt request, or drawn once, so that a resumed sample keeps its random numbers
    request_id: str  # new for each submission, since a scheduler may still hold an earlier one
    first: int  # index of the first sample among the samples of the prompt
    n: int  # number of samples
    generated_ids: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # uint32, tokens of a single resumed sample
    scores: bool = True  # ask for the prompt's log-probabilities, if the request has them
    routed: int = 0  # tokens whose experts were received from earlier schedulers

    @property
    def resumes(self) -> bool:
        """True unless all samples of the prompt start from its end."""
        return bool(self.n != self.prompt.settings.n or len(self.generated_ids))

    @property
    def most_tokens(self) -> int:
        """Tokens to compute if every sample reaches its limit. The prompt is computed once."""
        return len(self.prompt.prompt_ids) + self.n * self.prompt.max_tokens
