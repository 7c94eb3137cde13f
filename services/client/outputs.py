"""The outputs of an LLM."""

from dataclasses import dataclass, field
from typing import Any

from services.common.errors import TokaError
from services.gateway.engine.codec import FinishReason, TokenLogprob


@dataclass(frozen=True)
class Usage:
    """The token counts of one prompt and its samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache
    completion_tokens: int = 0  # of all samples


@dataclass(frozen=True)
class CompletionOutput:
    """A finished sample."""

    index: int
    text: str
    token_ids: list[int]  # a stop token included, which is not in the text
    logprobs: list[TokenLogprob] | None  # of token_ids. None if the parameters ask for none
    finish_reason: FinishReason

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of all tokens, or None if the parameters ask for none."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """The samples of one prompt, or the error because of which it has none."""

    prompt: str | None  # None if the prompt was given as token ids or messages
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    # For each prompt token from prompt_logprobs_start, log-probabilities by token id. The first token of the prompt has
    # None. None if the parameters ask for none.
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    error: TokaError | None = None

    @property
    def text(self) -> str:
        """Text of the first sample. Raises ``error`` if there is one."""
        if self.error is not None:
            raise self.error
        return self.outputs[0].text


@dataclass(frozen=True)
class StreamOutput:
    """The next part of a sample."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None  # of token_ids. None if the parameters ask for none
    finish_reason: FinishReason | None  # None before the last part
