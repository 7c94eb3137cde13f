"""What comes back."""

from dataclasses import dataclass, field
from typing import Any

from services.common.errors import TokaError
from services.gateway.engine.codec import FinishReason, TokenLogprob


@dataclass(frozen=True)
class Usage:
    """Tokens of one prompt and its samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not computed again
    completion_tokens: int = 0  # of all samples


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. ``token_ids`` has a stop token that ``text`` has not."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None  # beside token_ids; None: not asked for
    finish_reason: FinishReason

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all its tokens together."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its samples, or ``error``: why there are none."""

    prompt: str | None  # None: token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    # By token id, from prompt_logprobs_start; the entry of the prompt's first token is None. None: not asked for.
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    error: TokaError | None = None

    @property
    def text(self) -> str:
        """Of the first sample. Raises ``error``."""
        if self.error is not None:
            raise self.error
        return self.outputs[0].text


@dataclass(frozen=True)
class StreamOutput:
    """What is new in one sample. ``finish_reason`` is set in its last one."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None  # beside token_ids; None: not asked for
    finish_reason: FinishReason | None
