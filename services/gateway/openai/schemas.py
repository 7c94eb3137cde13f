"""The bodies of OpenAI requests, with the types and ranges this server takes. Strict: ``"3"`` is not a number.

What these do not name is in ``unsupported`` or unknown; unknown parameters end up in ``model_extra``.
"""

import contextlib
from array import array
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

MAX_STOPS = 16
MAX_STOP_BYTES = 4096
# Far beyond any use; they bound the time that one body takes to validate.
MAX_PROMPTS = 65_536
MAX_MESSAGES = 65_536
MAX_PARTS = 4096
MAX_BIASES = 2**18
MAX_STOP_TOKENS = 4096
_MAX_TOKEN_ID = 2**32 - 1


class Body(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def _prompts(value: Any) -> list[str] | list[np.ndarray]:
    """A prompt in any of OpenAI's four forms, as a list of prompts; token ids as uint32."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value:
        raise ValueError("expected at least one prompt, not an empty list")
    if all(isinstance(item, str) for item in value):
        return value
    prompts = value if all(isinstance(item, list) for item in value) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} has no tokens; give at least one")
    return [_token_ids(prompt) for prompt in prompts]


def _token_ids(prompt: list[Any]) -> np.ndarray:
    """``prompt`` as uint32. A list is looked through item by item only when something may be wrong with it."""
    with contextlib.suppress(TypeError, OverflowError):
        ids = np.frombuffer(array("I", prompt), np.uint32)
        if ids.min() > 1:  # else it may have been true or false
            return ids
    for item in prompt:
        if type(item) is not int or not 0 <= item <= _MAX_TOKEN_ID:
            raise ValueError(
                "expected a string, a list of strings, a list of token ids, or a list of lists of token ids;"
                f" found {_short(item)} among them"
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


Prompts = Annotated[
    list[str] | list[np.ndarray],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stops = Annotated[tuple[str, ...], PlainValidator(_stops, json_schema_input_type=str | list[str] | None)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: none is ever added


class GenerationBody(Body):
    """What completions and chat have in common."""

    nested: ClassVar[tuple[str, ...]] = ("stream_options",)  # fields with parameters of their own in them

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # OpenAI's newer name; counts before the other
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    priority: Annotated[int, Field(description="0 = normal; less goes first, more goes last")] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Tokens that each answer may have, as asked for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0)] | None = None


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
    name: str | None = None

    @model_validator(mode="after")
    def _no_tools_or_audio(self) -> "Message":
        for extra in ("tool_calls", "tool_call_id", "function_call", "audio", "refusal"):
            if (self.model_extra or {}).get(extra):
                raise ValueError(f"messages with {extra!r} are not supported by this server yet; leave them out")
        return self

    def render(self) -> dict[str, str]:
        """As chat templates take it. OpenAI's ``developer`` is what every template calls ``system``."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name is not None else {})


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    nested = ("stream_options", "messages")

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        return self
