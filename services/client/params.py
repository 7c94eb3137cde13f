"""Sampling parameters, which are validated when they are created."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.gateway.openai.parse import parse
from services.gateway.openai.schemas import CompletionBody


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters of ``/v1/completions``, with the same names (docs/api.md). None: the model's default.

    Raises ``InvalidRequest``, which names the parameter. Rules that depend on the model are checked for each request.
    """

    n: int = 1
    max_tokens: int | None = (
        None  # None: 16 for a completion. For a chat the model's default, or the rest of the context
    )
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    end_stragglers_after: int | None = None  # finished samples of a prompt after which the others end
    park_stragglers_after: int | None = None  # finished samples of a prompt after which the others are parked
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # number of alternatives for each token
    logprobs_mode: str | None = None  # raw or processed. None: the server's default
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int | None = None  # position of the first prompt token to score
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    thinking_token_budget: int | None = None  # maximum number of tokens in the reasoning section
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # side on which a longer prompt is truncated: left (the default) or right
    add_special_tokens: bool = True  # to prompts that are texts
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        self.body  # noqa: B018 (it validates)

    @cached_property
    def body(self) -> CompletionBody:
        """The parameters as the body of a completion."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.logit_bias, Mapping):
            given["logit_bias"] = {str(k): v for k, v in self.logit_bias.items()}
        given |= {name: _listed(given[name]) for name in ("stop", "stop_token_ids")}
        try:
            text = orjson.dumps(given | {"prompt": "x"}, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise InvalidRequest(f"sampling parameters must be plain numbers, texts and lists: {error}") from None
        return parse(text, CompletionBody)


def _listed(value: Any) -> Any:
    """Return a tuple, an array or another iterable as a list, and other values as they are."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else value
