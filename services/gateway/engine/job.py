"""What a scheduler is asked to do, in the gateway's own terms: no HTTP and no wire format here."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal

import numpy as np

GrammarKind = Literal["json_schema", "regex", "choices", "lark"]  # those of the contract
NO_TOKENS = np.zeros(0, np.uint32)


class Priority(Enum):
    """Who goes first when there is not room for all."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True)
class Grammar:
    """What an answer matches as a whole."""

    kind: GrammarKind
    value: str | tuple[str, ...]  # tuple: the choices
    field: str  # the caller's parameter that it comes from
    composed: bool = False  # by the gateway, out of what the caller said

    @property
    def text(self) -> str:
        """Its one text, of any kind but choices."""
        if not isinstance(self.value, str):
            raise TypeError(f"a grammar of {self.kind} has several texts")
        return self.value

    @cached_property
    def size(self) -> int:
        """Bytes of its text."""
        return sum(len(text.encode()) for text in ([self.value] if isinstance(self.value, str) else self.value))


@dataclass(frozen=True)
class Settings:
    """What all prompts of one HTTP request have in common. ``None`` = the model's default."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None  # of the prompt's tokens, and so many of the most likely ones
    prompt_logprobs_start: int = 0  # position of the first prompt token to score
    processed_logprobs: bool | None = None  # of the distribution that tokens are drawn from; None: the server's default
    grammar: Grammar | None = None
    thinking_tokens: int | None = None  # most tokens of the reasoning section
    thinking_opened: bool | None = None  # the section is open where the prompt ends; None: as the prompt's tokens say
    priority: Priority = Priority.NORMAL
    cache_salt: str = ""
    traceparent: str = ""  # W3C trace context of the caller
    fairness_key: str = ""  # whom it is for: keys share the scheduler's queue
    deadline_ms: int | None = None  # milliseconds of the monotonic clock: an error then
    # What the gateway makes of the tokens; the scheduler is not told.
    include_stop: bool = False  # the answer ends behind its stop string or stop token
    special_tokens: bool = False  # they have text
    return_token_ids: bool = False
    packed_logprobs: bool = False  # in the fingerprint, and not beside the text
    told_prompt_logprobs: int | None = None  # by that name; `prompt_logprobs` may be for an echo, or more
    open_ended: bool = False  # nobody said how long an answer may be
    silent: bool = False  # no answer was asked for: its one token, which a scheduler needs, is nobody's


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and ``settings.n`` samples of it. Everything a scheduler needs, so that it can be sent to another."""

    request_id: str
    model: str
    prompt_ids: np.ndarray  # uint32 [prompt_tokens], at least one
    max_tokens: int  # for each sample; prompt and answer fit into the context
    seed: int | None  # unsigned 64 bits
    settings: Settings


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """The part of a job that is sent to one scheduler.

    It is the whole job, or after the loss of another scheduler, its unfinished samples with their tokens so far.
    """

    job: Job
    seed: int  # the job's, or one drawn for it: noise goes on where it was
    request_id: str  # a scheduler may still know the one that was sent before
    first: int  # the index of its first sample among the job's
    samples: int  # in a row
    held: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # uint32, tokens that its only sample has
    scores: bool = True  # the prompt's log-probabilities, if the job wants them, come with this part

    @property
    def resumes(self) -> bool:
        """True if it is less than the job."""
        return bool(self.samples != self.job.settings.n or len(self.held))

    @property
    def most_tokens(self) -> int:
        """Tokens to compute if every sample runs to its limit: the prompt is computed once."""
        return len(self.job.prompt_ids) + self.samples * self.job.max_tokens
