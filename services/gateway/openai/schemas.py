"""The bodies of OpenAI requests, with the types and ranges this server takes.

What these do not name is in ``unsupported`` or unknown; unknown parameters end up in ``model_extra``.
"""

import contextlib
from array import array
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from services.common.json_scan import Bulk
from services.common.logprobs_mode import LogprobsMode
from services.common.request_bounds import MAX_BIASES, MAX_STOP_TOKENS
from services.gateway.openai.body import Body, Elsewhere
from services.gateway.openai.grammar.body import GrammarBody
from services.gateway.openai.json_value import shown
from services.gateway.openai.messages import AllowedTools, ConversationBody, ReasoningEffort, ToolChoice
from services.gateway.openai.other_names import SAME, SAME_IN_CHAT, SIMILAR, SIMILAR_IN_CHAT

MAX_STOPS = 16
MAX_STOP_BYTES = 4096
# Far beyond any use; they bound the time that one body takes to validate.
MAX_PROMPTS = 65_536
MAX_METADATA = 16
_MAX_TOKEN_ID = 2**32 - 1
_MAX_BIAS = 100


def _prompts(value: Any) -> Any:
    """A prompt in any of OpenAI's four forms, as a list of prompts; token ids as uint32."""
    if isinstance(value, (str, np.ndarray)):  # an array: of a large body
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value:
        raise ValueError("expected at least one prompt, not an empty list")
    if all(isinstance(item, (str, np.ndarray)) for item in value) and len({type(item) for item in value}) == 1:
        return value
    prompts = value if all(isinstance(item, (list, np.ndarray)) for item in value) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} has no tokens; give at least one")
    return [token_ids(prompt) for prompt in prompts]


def token_ids(prompt: list[Any] | np.ndarray) -> np.ndarray:
    """Return ``prompt`` as uint32. Raises ``ValueError`` if something else than token ids is in it."""
    if isinstance(prompt, np.ndarray):
        return prompt
    with contextlib.suppress(TypeError, OverflowError):
        ids = np.frombuffer(array("I", prompt), np.uint32)
        if ids.min() > 1:  # else it may have been true or false
            return ids
    for item in prompt:
        if type(item) is not int or not 0 <= item <= _MAX_TOKEN_ID:
            raise ValueError(
                "expected a string, a list of strings, a list of token ids, or a list of lists of token ids;"
                f" found {shown(item, 40)} among them"
            )
    return np.array(prompt, np.uint32)


def _stops(value: Any) -> tuple[str, ...]:
    """``stop`` as a tuple of stop strings."""
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
    if any(len(stop.encode()) > MAX_STOP_BYTES for stop in stops):
        raise ValueError(f"a stop string has at most {MAX_STOP_BYTES} bytes")
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    return tuple(stops)


def at_most(most: int, value: Any) -> Any:
    """Return ``value``. Raises ``ValueError`` for an object with more than ``most`` members, before one is checked."""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"expected at most {most} items (got an object of {len(value)})")
    return value


def _first_wrong_bias(value: Any) -> Any:
    """Return ``value``, or its first wrong member alone: each wrong member would be an error of its own."""
    if not isinstance(value, dict):
        return value
    for token, bias in value.items():
        if type(bias) not in (int, float) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            return {token: bias}
    return value


def _some(tokens: int) -> int:
    if tokens == 0:
        raise ValueError("expected at least 1, or -1 for as many as there is room for")
    return tokens


Prompts = Annotated[
    list[str] | list[np.ndarray],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stops = Annotated[tuple[str, ...], PlainValidator(_stops, json_schema_input_type=str | list[str] | None)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(partial(at_most, MAX_METADATA)),
]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(_first_wrong_bias),
    BeforeValidator(partial(at_most, MAX_BIASES)),
]
Timeout = Annotated[float, Field(gt=0, le=86_400, description="seconds that the request may take; beyond them: 504")]
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: none is ever added

    @model_validator(mode="after")
    def _usage_is_wanted(self) -> "StreamOptions":
        if self.continuous_usage_stats and self.include_usage is False:
            raise ValueError("continuous_usage_stats needs usage; leave include_usage out, or set it to true")
        return self


class SamplingBody(Body):
    """What all endpoints that generate have in common."""

    bulks: ClassVar[Mapping[str, Bulk]] = {"logit_bias": Bulk(MAX_BIASES)}

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logit_bias: Bias | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, description="1 = off")] | None = None
    logprobs_mode: LogprobsMode | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    priority: Annotated[int, Field(description="0 = normal; less goes first, more goes last")] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    timeout: Timeout | None = None
    # OpenAI's bookkeeping: checked as there, and of no effect.
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None


class GenerationBody(GrammarBody, SamplingBody):
    """What completions and chat have in common."""

    # Fields with parameters of their own in them.
    nested: ClassVar[tuple[str, ...]] = ("stream_options", "response_format", "structured_outputs")
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = SIMILAR
    other_names: ClassVar[Mapping[str, str]] = SAME

    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # OpenAI's newer name; counts before the other
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs_start: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs_in_fingerprint: Annotated[bool, Field(description="packed, in system_fingerprint")] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), AfterValidator(_some)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Tokens that each answer may have, as asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def samples(self) -> int:
        """Answers to make of each prompt."""
        return self.n or 1

    @property
    def prompt_top(self) -> int | None:
        """Most likely tokens to find beside each token of the prompt; None: not even its own log-probability."""
        return self.prompt_logprobs

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(
            self.stream_options.include_usage or self.stream_options.continuous_usage_stats
        )

    @property
    def wants_running_usage(self) -> bool:
        """True if every chunk of a stream has the usage of its choice so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _prompt_logprobs_or_stream(self) -> "GenerationBody":
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not with stream; leave one of them out")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_start_needs_prompt_logprobs(self) -> "GenerationBody":
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ValueError("prompt_logprobs_start: only allowed with prompt_logprobs; send both, or leave it out")
        return self

    @model_validator(mode="after")
    def _packed_logprobs_or_stream(self) -> "GenerationBody":
        if self.logprobs_in_fingerprint and self.stream:
            raise ValueError(
                "logprobs_in_fingerprint: not with stream, whose fingerprint comes first; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _special_tokens_and_stop_strings(self) -> "GenerationBody":
        if self.skip_special_tokens is False and self.stop:
            raise ValueError(
                "skip_special_tokens: false does not go with stop, which is looked for in the text without special"
                " tokens; leave one of them out, or use stop_token_ids"
            )
        return self

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    bulks: ClassVar[Mapping[str, Bulk]] = {**SamplingBody.bulks, "prompt": Bulk()}

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1

    @property
    def prompt_top(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((top for top in (echoed, self.prompt_logprobs) if top is not None), default=None)

    @model_validator(mode="after")
    def _best_of_at_least_n(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of: expected at least n={self.n}, of which it is the choice")
        if self.best_of is not None and self.stream:
            raise ValueError("best_of: not with stream, which cannot wait for the best; leave one of them out")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_start_or_echo(self) -> "CompletionBody":
        if self.prompt_logprobs_start and self.echo and self.logprobs is not None:
            raise ValueError(
                "prompt_logprobs_start: not with echo and logprobs, which return the log-probabilities of the whole"
                " prompt; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _packed_logprobs_or_echo(self) -> "CompletionBody":
        if self.logprobs_in_fingerprint and self.echo:
            raise ValueError(
                "logprobs_in_fingerprint: not with echo, it has those of the answer only; leave one of them out, or"
                " ask for prompt_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _no_tokens_only_with_the_prompt(self) -> "CompletionBody":
        if self.most_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 is only allowed with echo or prompt_logprobs; ask for at least 1")
        return self


class ChatBody(ConversationBody, GenerationBody):
    """``POST /v1/chat/completions``."""

    nested = (*GenerationBody.nested, "messages", "tools")
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        **SIMILAR_IN_CHAT,
        "include": Elsewhere("logprobs", ([],)),
        "instructions": Elsewhere("a message of the role 'system'"),
        "previous_response_id": Elsewhere("the whole conversation as messages"),
        "reasoning": Elsewhere("reasoning_effort", ({},)),
        "text": Elsewhere("response_format", ({},)),
    }
    other_names = SAME_IN_CHAT

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _only_allowed_tools(self) -> "ChatBody":
        """Replace ``allowed_tools`` by its mode, and leave out the tools that it does not name."""
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.allowed_tools
            names = {tool.function.name for tool in allowed.tools}
            if missing := names - {tool.function.name for tool in self.tools or ()}:
                raise ValueError(f"tool_choice: there is no tool {min(missing)[:64]!r} among tools")
            self.tools = [tool for tool in self.tools or () if tool.function.name in names]
            self.tool_choice, self._only_allowed = allowed.mode, True
        return self
