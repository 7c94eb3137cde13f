"""The body of ``POST /v1/responses``, and the chat completion that it is translated to."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from services.common.errors import InvalidValue, UnsupportedParameter
from services.gateway.openai.body import Body, Elsewhere, Id, optional
from services.gateway.openai.fields import Metadata
from services.gateway.openai.grammar.body import NamedSchema, ResponseFormat, SchemaName
from services.gateway.openai.json_value import Schema
from services.gateway.openai.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Message,
    ReasoningEffort,
    Variables,
    unique_names,
)
from services.gateway.openai.problems import describe
from services.gateway.openai.responses.input_items import Item, messages_of
from services.gateway.openai.responses.tools import (
    AllowedResponseTools,
    NamedResponseTool,
    ResponseTool,
    chat_choice,
    chat_tools,
    grammars,
    hosted,
    names_of,
)
from services.gateway.openai.schemas import ChatBody, SamplingBody
from services.gateway.openai.unsupported import refused_names

# Parameters that only OpenAI supports, with the values that change nothing. Other values are rejected.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "prompt": (),
}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Parameters of other endpoints.
_FORM, _LENGTH = Elsewhere("text.format"), Elsewhere("max_output_tokens")
_ELSEWHERE = {
    "guided_choice": _FORM,
    "guided_grammar": _FORM,
    "guided_json": _FORM,
    "guided_regex": _FORM,
    "include_stop_str_in_output": Elsewhere("", (False,)),
    "logprobs": Elsewhere(f"include=[{LOGPROBS!r}]", (False,)),
    "logprobs_in_fingerprint": Elsewhere("", (False,)),
    "max_completion_tokens": _LENGTH,
    "max_tokens": _LENGTH,
    "messages": Elsewhere("input"),
    "n": Elsewhere("", (1,)),
    "prompt_logprobs": Elsewhere(),
    "prompt_logprobs_start": Elsewhere("", (0,)),
    "reasoning_effort": Elsewhere("reasoning.effort", ("none",)),
    "response_format": Elsewhere("text.format", ({"type": "text"},)),
    "return_token_ids": Elsewhere("", (False,)),
    "skip_special_tokens": Elsewhere("", (True,)),
    "structured_outputs": _FORM,
}


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Reasoning(Body):
    """Settings of the model's thinking: its length, and the part that the client gets."""

    effort: ReasoningEffort | None = optional(
        "For chat templates that have it. none turns thinking off if the template allows that."
    )
    summary: str | None = optional("auto: no summary is written. The reasoning item has the whole reasoning.")

    @field_validator("summary")
    @classmethod
    def _no_summarizer(cls, summary: str | None) -> str | None:
        if summary not in (None, "auto"):
            raise ValueError(
                "this server writes no summaries: the reasoning item has all of it; send 'auto' or leave it out"
            )
        return summary


class TextFormat(Body):
    """The form of the text: ``response_format`` of chat completions without nesting."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema", description="For type json_schema.")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> "TextFormat":
        given = (self.type == "json_schema") is (self.schema_ is not None)
        if not given or (self.type == "json_schema" and self.name is None):
            raise ValueError("'name' and 'schema' are needed with type 'json_schema', and not allowed with other types")
        return self

    def chat(self) -> ResponseFormat:
        """Return the form in the type of chat completions."""
        if self.type != "json_schema" or self.name is None or self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = NamedSchema(name=self.name, description=self.description, schema=self.schema_, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextConfig(Body):
    """Settings of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool | None = optional("Accepted: no padding is ever added.")


def check_includes(includes: list[str]) -> list[str]:
    """Return ``includes``, additions to a response. Raises ``ValueError`` for an addition that is not supported."""
    for name in includes:
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise ValueError(
                f"{name[:100]!r} is not supported by this server yet, only {LOGPROBS!r} and {ENCRYPTED_REASONING!r};"
                " leave it out"
            )
    return includes


def _items_or_none(value: Any) -> Any:
    return [] if value is None else _items(value)


Includes = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=64), AfterValidator(check_includes)]

Unsupported = Annotated[Any, Field(description="Not supported: any value that is not neutral is rejected with 400.")]


class ConversationReference(Body):
    """A stored conversation."""

    id: Id


class ResponsesBody(SamplingBody):
    """``POST /v1/responses``."""

    nested: ClassVar[tuple[str, ...]] = ("stream_options", "reasoning", "text", "tools")
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = refused_names(_LENGTH, _FORM, "input", _ELSEWHERE)

    input: Annotated[
        list[Item],
        Field(
            min_length=1,
            max_length=MAX_MESSAGES,
            description="A text, or items: messages, calls, outputs of calls, and reasoning.",
        ),
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    ]
    metadata: Metadata | None = optional("Returned in the response.")
    store: bool | None = optional("true: store the response for 30 days. Default: true if the gateway has a store.")
    instructions: str | None = optional(
        "A system message before the input. Responses that continue this one do not inherit it."
    )
    max_output_tokens: Annotated[int, Field(ge=1)] | None = optional(
        "Maximum number of tokens in the answer, reasoning included."
    )
    stream_options: ResponseStreamOptions | None = optional("Only allowed with stream.")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), unique_names(names_of)] | None = optional(
        "Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools | None = optional(
        "none, auto, required, or one of the tools."
    )
    parallel_tool_calls: bool | None = optional("false: allow at most one call.")
    reasoning: Reasoning | None = optional("Settings of the reasoning.")
    text: TextConfig | None = optional("Form of the text.")
    include: Includes | None = optional("message.output_text.logprobs, reasoning.encrypted_content.")
    top_logprobs: Annotated[int, Field(ge=0)] | None = optional("Number of alternatives for each token, at most 20.")
    previous_response_id: Id | None = optional("Id of the stored response that this one continues.")
    chat_template_kwargs: Variables | None = optional("Variables of the chat template, such as enable_thinking.")

    truncation: Literal["auto", "disabled"] | None = optional(
        "auto: drop the oldest items of a conversation that exceeds the context."
    )
    background: bool | None = optional(
        "true: generate the response without a connected client, and store it. Not allowed with store=false."
    )
    conversation: Id | ConversationReference | None = optional(
        "Id of a stored conversation. The input and output items are added to it."
    )

    access_programs: Unsupported = None
    background_options: Unsupported = None
    context_management: Unsupported = None
    image: Unsupported = None
    max_tool_calls: Unsupported = None
    prompt: Unsupported = None

    @model_validator(mode="after")
    def _background_is_stored(self) -> "ResponsesBody":
        if self.background and self.store is False:
            raise ValueError("background: not with store=false; leave store out, since the response is asked for later")
        return self

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the response belongs to."""
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation

    @property
    def drops_oldest(self) -> bool:
        """True if a conversation that is too long is truncated instead of rejected."""
        return self.truncation == "auto"

    @property
    def wants_logprobs(self) -> bool:
        """True if the text of messages comes with log-probabilities."""
        return bool(LOGPROBS in (self.include or ()) or self.top_logprobs)

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """True if reasoning items have ``encrypted_content``."""
        return ENCRYPTED_REASONING in (self.include or ())

    @property
    def left_out(self) -> list[str]:
        """Parts of the request that have no effect on the answer. A header lists them."""
        names = [f"tools.{kind}" for kind in hosted(self.tools or ())]
        return [*names, "tools.format"] if grammars(self.tools or ()) else names

    def chat(self) -> ChatBody:
        """Return the request as a chat completion. Raises ``InvalidRequest`` for parts that are not supported."""
        self._refuse_unsupported()
        tools = chat_tools(self.tools or ())
        try:
            return ChatBody(
                **{name: getattr(self, name) for name in SamplingBody.model_fields},
                messages=self._messages(),
                max_completion_tokens=self.max_output_tokens,
                tools=tools or None,
                tool_choice=chat_choice(self.tool_choice, self.tools or ()),
                parallel_tool_calls=self.parallel_tool_calls,
                reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
                response_format=self.text.format.chat() if self.text and self.text.format else None,
                logprobs=self.wants_logprobs,
                top_logprobs=self.top_logprobs,
                chat_template_kwargs=self.chat_template_kwargs,
            )
        except ValidationError as error:  # of a rule of chat completions
            raise describe(error, {}) from None

    def _refuse_unsupported(self) -> None:
        for name, neutrals in _NEUTRAL.items():
            value = getattr(self, name)
            if value is None or any(value == neutral and type(value) is type(neutral) for neutral in neutrals):
                continue
            message = f"{name!r} is not supported by this server yet; leave it out"
            raise UnsupportedParameter(message, field=name)

    def _messages(self) -> list[Message]:
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        messages += messages_of(self.input)
        if not messages:
            raise InvalidValue.at("input", "it has only reasoning; add a message to answer")
        if len(messages) > MAX_MESSAGES:
            raise InvalidValue.at(
                "input", f"{len(messages)} messages with the instructions: at most {MAX_MESSAGES}; send fewer"
            )
        return messages


class InputTokensBody(ResponsesBody):
    """``POST /v1/responses/input_tokens``."""

    input: Annotated[
        list[Item],
        Field(
            max_length=MAX_MESSAGES,
            default_factory=list,
            description="A text, or items: messages, calls, outputs of calls, and reasoning.",
        ),
        BeforeValidator(_items_or_none, json_schema_input_type=str | list[Item] | None),
    ]
    truncation: Literal["auto", "disabled"] | None = optional(
        "auto: count what remains after the oldest items are dropped."
    )
