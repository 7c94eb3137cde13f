"""The bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, translated to chat requests."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from services.common.errors import InvalidRequest
from services.gateway.anthropic.blocks import TextBlocks, Turn
from services.gateway.anthropic.conversation import ModelTraits, chat_messages, check_prefill
from services.gateway.anthropic.tools import MessagesTool, MessagesToolChoice
from services.gateway.openai.body import Body, Elsewhere, optional
from services.gateway.openai.fields import ModelName, Stops
from services.gateway.openai.grammar.body import NamedSchema, ResponseFormat
from services.gateway.openai.json_value import Schema
from services.gateway.openai.messages import MAX_MESSAGES, MAX_TOOLS, unique_names
from services.gateway.openai.schemas import ChatBody, SamplingBody
from services.gateway.openai.unsupported import refused_names

ENABLE_THINKING, EFFORT = "enable_thinking", "reasoning_effort"  # variables of chat templates
_KEEP_ALL_THINKING = "clear_thinking_20251015"

_FORMAT, _LENGTH = Elsewhere("output_config.format"), Elsewhere("max_tokens")
_ELSEWHERE = {
    # Anthropic's parameters. The given values have no effect. Other values are rejected.
    "billing_policy": Elsewhere(),
    "compaction": Elsewhere(),
    "container": Elsewhere(),
    "fallback_credit_token": Elsewhere(),
    "fallbacks": Elsewhere(),
    "inference_geo": Elsewhere(),
    "mcp_servers": Elsewhere("", ([],)),
    "speed": Elsewhere("", ("standard",)),
    "thread": Elsewhere(),
    # Parameters of other endpoints.
    "instructions": Elsewhere("system"),
    "logprobs": Elsewhere("", (False,)),
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "n": Elsewhere("", (1,)),
    "prompt_logprobs": Elsewhere(),
    "reasoning_effort": Elsewhere("output_config.effort", ("none",)),
    "response_format": _FORMAT,
    "text": _FORMAT,
}
Tools = Annotated[
    list[MessagesTool], Field(max_length=MAX_TOOLS), unique_names(lambda tools: [tool.name for tool in tools])
]
# Fields of the sampling body that have other names or meanings here.
_OWN = frozenset({"stop", "metadata", "user", "store", "thinking_token_budget"})


class Thinking(Body):
    """Settings of thinking before the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = optional(
        "Maximum number of tokens in the thinking, if the server can limit it."
    )
    display: Literal["summarized", "omitted"] | None = optional("omitted: return thinking blocks without their text.")

    @property
    def wanted(self) -> bool:
        """True unless thinking is disabled."""
        return self.type != "disabled"


class JsonFormat(Body):
    """A schema that the text of the answer satisfies."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Body):
    """Settings of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = optional(
        "For chat templates that have reasoning_effort."
    )
    format: JsonFormat | None = None


class ContextManagement(Body):
    """Rules for shortening the conversation."""

    edits: list[dict[str, Any]] | None = None

    @field_validator("edits")
    @classmethod
    def _edits_change_nothing(cls, edits: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for edit in edits or ():
            if edit.get("type") != _KEEP_ALL_THINKING or edit.get("keep") != "all":
                raise ValueError(
                    f"this server does not shorten conversations: the only supported edit is {_KEEP_ALL_THINKING!r}"
                    " with keep='all'; leave the others out"
                )
        return edits


class CountTokensBody(Body):
    """The body of ``POST /v1/messages/count_tokens``: all parameters that affect the prompt."""

    nested: ClassVar[tuple[str, ...]] = ("messages", "system", "tools", "tool_choice", "thinking", "output_config")
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = refused_names(_LENGTH, _FORMAT, "messages", _ELSEWHERE)

    model: ModelName = None
    messages: Annotated[
        list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation, in order.")
    ]
    system: TextBlocks | None = optional("A system message before the conversation: a text, or blocks of type text.")
    tools: Tools | None = optional("Functions that the model may call.")
    tool_choice: MessagesToolChoice | None = optional("auto, any, none, or a tool by its name.")
    thinking: Thinking | None = optional(
        "enabled, adaptive or disabled. Default: disabled, if the chat template has enable_thinking."
    )
    output_config: OutputConfig | None = optional("Effort, and the schema that the text has to match.")
    output_format: JsonFormat | None = optional("Older name of output_config.format.")
    context_management: ContextManagement | None = optional(
        "clear_thinking_20251015 with keep=all, which has no effect. Other edits are rejected."
    )
    cache_control: Any = optional("Accepted: every prompt is cached.")

    @model_validator(mode="after")
    def _one_format(self) -> "CountTokensBody":
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format: not with output_config.format, its newer name; leave one of them out")
        return self

    def count(self, traits: ModelTraits) -> ChatBody:
        """Return a chat request with the same prompt. Raises InvalidRequest."""
        return ChatBody(**self._conversation(traits))

    def unhonoured(self, traits: ModelTraits) -> list[str]:
        """Return the names of parameters that have no effect with this model."""
        names, thinking, config = [], self.thinking, self.output_config
        if thinking is not None and ENABLE_THINKING not in traits.variables and thinking.wanted is not traits.reasoning:
            names.append("thinking")
        elif thinking is not None and thinking.budget_tokens is not None and not traits.thinking_budgets:
            names.append("thinking.budget_tokens")
        if config is not None and config.effort is not None and EFFORT not in traits.variables:
            names.append("output_config.effort")
        return names

    def _conversation(self, traits: ModelTraits) -> dict[str, Any]:
        """Return the fields of a chat request that affect its prompt.

        Without ``thinking``, thinking is disabled if the template has a variable for it.
        """
        messages = chat_messages(self.system, self.messages, late_system=traits.late_system)
        continued = self.messages[-1].role == "assistant"
        if continued:
            check_prefill(messages[-1])
        config = self.output_config or OutputConfig()
        given: dict[str, Any] = {}
        if ENABLE_THINKING in traits.variables:
            given[ENABLE_THINKING] = self.thinking is not None and self.thinking.wanted
        if EFFORT in traits.variables and config.effort is not None:
            given[EFFORT] = config.effort
        choice = self.tool_choice
        return {
            "messages": messages,
            "tools": [tool.chat() for tool in self.tools] if self.tools else None,
            "tool_choice": None if choice is None else choice.chat(),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "chat_template_kwargs": given,
            "add_generation_prompt": not continued,
            "continue_final_message": continued,
        }


class MessagesBody(CountTokensBody, SamplingBody):
    """The body of ``POST /v1/messages``."""

    stream: bool | None = optional("true: send server-sent events, with message_stop as the last one.")
    stop: Stops = Field(default=(), description="The same as stop_sequences.")
    max_tokens: Annotated[int, Field(ge=1, description="Maximum number of tokens in the answer, thinking included.")]
    stop_sequences: Stops = Field(
        default=(), description="At most 16 stop strings of at most 4,096 bytes. The answer ends before the first one."
    )
    metadata: dict[str, Any] | None = optional("Accepted without effect.")
    service_tier: Literal["auto", "standard_only"] | None = optional("Accepted: there is only one tier.")
    diagnostics: Any = optional("Accepted without effect.")
    thread: Any = optional("Not supported: rejected with 400. The SDK then sends whole conversations.")

    @model_validator(mode="after")
    def _one_list_of_stops(self) -> "MessagesBody":
        if self.stop and self.stop_sequences:
            raise ValueError("stop: not with stop_sequences, which is the same; leave one of them out")
        return self

    @model_validator(mode="after")
    def _one_thinking_budget(self) -> "MessagesBody":
        if self.thinking_token_budget is not None and self.thinking is not None and self.thinking.budget_tokens:
            raise ValueError(
                "thinking_token_budget: not with thinking.budget_tokens, which is the same; leave one of them out"
            )
        return self

    def chat(self, traits: ModelTraits) -> ChatBody:
        """Return the same request to chat completions. Raises InvalidRequest."""
        if self.thread is not None:  # with this reason, Anthropic's SDK continues without a thread
            raise InvalidRequest.at(
                "thread",
                "this server stores no conversations; leave it out, and send the whole conversation each time",
                reason="THREAD_UNSUPPORTED_REQUEST",
            )
        return ChatBody(
            **{name: getattr(self, name) for name in SamplingBody.model_fields if name not in _OWN},
            **self._conversation(traits),
            stop=self.stop_sequences or self.stop,
            max_tokens=self.max_tokens,
            **self._thinking_budget(traits),
            response_format=self._response_format(),
        )

    def _thinking_budget(self, traits: ModelTraits) -> dict[str, Any]:
        if not traits.thinking_budgets or self.thinking is None or self.thinking.budget_tokens is None:
            return {"thinking_token_budget": self.thinking_token_budget}
        return {"thinking_token_budget": self.thinking.budget_tokens}

    def _response_format(self) -> ResponseFormat | None:
        form = self.output_format or (self.output_config.format if self.output_config else None)
        if form is None:
            return None
        return ResponseFormat(type="json_schema", json_schema=NamedSchema(name="output", schema=form.schema_))
