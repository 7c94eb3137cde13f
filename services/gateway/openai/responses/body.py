"""The body of ``POST /v1/responses``, and the conversation that it stands for."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from services.common.errors import InvalidRequest
from services.gateway.openai.body import Body, Elsewhere, Id
from services.gateway.openai.grammar.body import NamedSchema, ResponseFormat, SchemaName
from services.gateway.openai.json_value import check_schema
from services.gateway.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    PastCall,
    ReasoningEffort,
    Tool,
    check_names_differ,
)
from services.gateway.openai.schemas import ChatBody, SamplingBody

# Of OpenAI's own: with these values they change nothing, with others they are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "prompt": (),
    "truncation": ("disabled",),
}
_REASONS = {
    "background": "this server answers while you wait; leave it out, set it to False, or send a batch",
    "conversation": "this server keeps responses and no conversations: go on from one with previous_response_id",
}
LOGPROBS = "message.output_text.logprobs"
# Of other endpoints.
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
    "reasoning_effort": Elsewhere("reasoning.effort", ("none",)),
    "response_format": Elsewhere("text.format", ({"type": "text"},)),
    "return_token_ids": Elsewhere("", (False,)),
    "skip_special_tokens": Elsewhere("", (True,)),
    "structured_outputs": _FORM,
}


class InputPart(Body):
    """A piece of a text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Text = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


class InputMessage(Body):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class InputCall(Body):
    """A tool call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Body):
    """What came of it."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningPart(Body):
    """A piece of the model's thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """What the model thought."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None


def _tag(item: Any) -> str:
    """A tag begins with #, so that nobody takes it for a part of a parameter's name."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return "#message"
    # Anything else than a name may be nested as deep as JSON goes, and is not put into words.
    return f"#{kind if isinstance(kind, str) else type(kind).__name__}"


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Item = Annotated[
    Annotated[InputMessage, Tag("#message")]
    | Annotated[InputCall, Tag("#function_call")]
    | Annotated[InputCallOutput, Tag("#function_call_output")]
    | Annotated[InputReasoning, Tag("#reasoning")],
    Discriminator(_tag),
]


class Typed(Body):
    """First of all a tool is checked to be of the one kind there is."""

    type: Literal["function"]


class FunctionTool(Function, Typed):
    """A function that the model may call."""


class NamedFunctionTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    name: str


class Reasoning(Body):
    """How long to think."""

    effort: ReasoningEffort | None = None
    summary: None = None


class TextFormat(Body):
    """What the text has to match: ``response_format`` of chat completions, laid flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @field_validator("schema_")
    @classmethod
    def _schema_is_bounded(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            check_schema(schema)
        return schema

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> "TextFormat":
        given = (self.type == "json_schema") is (self.schema_ is not None)
        if not given or (self.type == "json_schema" and self.name is None):
            raise ValueError("'name' and 'schema' are there exactly with type 'json_schema'")
        return self

    def chat(self) -> ResponseFormat:
        """The same to chat completions."""
        if self.type != "json_schema" or self.name is None or self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = NamedSchema(name=self.name, description=self.description, schema=self.schema_, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


def _named(tool: NamedFunctionTool) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=tool.name))


class TextConfig(Body):
    """What the text is like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Body):
    """How a stream is."""

    include_obfuscation: bool | None = None  # padding against eavesdroppers: none is ever added


def check_includes(includes: list[str]) -> list[str]:
    """What a response may have besides. Raises ``ValueError`` for what this server's have not."""
    for name in includes:
        if name != LOGPROBS:
            raise ValueError(f"{name[:100]!r} is not supported by this server yet, only {LOGPROBS!r}; leave it out")
    return includes


Includes = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=64), AfterValidator(check_includes)]


class ResponsesBody(SamplingBody):
    """``POST /v1/responses``."""

    nested: ClassVar[tuple[str, ...]] = ("stream_options", "reasoning", "text", "tools")
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = _ELSEWHERE

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: Includes | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    previous_response_id: Id | None = None

    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    prompt: Any = None
    truncation: Any = None

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, tools: list[FunctionTool] | None) -> list[FunctionTool] | None:
        check_names_differ(tool.name for tool in tools or ())
        return tools

    @property
    def wants_logprobs(self) -> bool:
        """Whether the words for the user come with log-probabilities."""
        return bool(self.include or self.top_logprobs)

    def chat(self) -> ChatBody:
        """The same request to chat completions. ``InvalidRequest`` for what this server does not do."""
        self._refuse_what_is_not_neutral()
        reasoning = self.reasoning or Reasoning()
        named = self.tool_choice
        choice = _named(named) if isinstance(named, NamedFunctionTool) else named
        return ChatBody(
            **{name: getattr(self, name) for name in SamplingBody.model_fields},
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            tools=[Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools]
            if self.tools
            else None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=reasoning.effort,
            response_format=self.text.format.chat() if self.text and self.text.format else None,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
        )

    def _refuse_what_is_not_neutral(self) -> None:
        for name, neutrals in _NEUTRAL.items():
            value = getattr(self, name)
            if value is None or any(value == neutral and type(value) is type(neutral) for neutral in neutrals):
                continue
            default = f"{name!r} is not supported by this server yet; leave it out"
            raise InvalidRequest(_REASONS.get(name, default), field=name, reason="UNSUPPORTED_PARAMETER")

    def _messages(self) -> list[Message]:
        """Thoughts and calls become parts of the assistant's message that they belong to."""
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        thoughts, turn = None, None  # turn: the assistant's message that may still get calls
        for item in self.input:
            match item:
                case InputReasoning():
                    thoughts, turn = _joined(item.content or item.summary or []), None
                case InputCall():
                    call = PastCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                    if turn is None:
                        turn = Message(role="assistant", content="", reasoning_content=thoughts, tool_calls=[])
                        messages.append(turn)
                    turn.tool_calls = [*(turn.tool_calls or []), call]
                    thoughts = None
                case InputCallOutput():
                    messages.append(Message(role="tool", content=_joined(item.output), tool_call_id=item.call_id))
                    turn = None
                case InputMessage(role="assistant"):
                    turn = Message(role="assistant", content=_joined(item.content), reasoning_content=thoughts)
                    messages.append(turn)
                    thoughts = None
                case InputMessage():
                    messages.append(Message(role=item.role, content=_joined(item.content)))
                    turn = None
        if not messages:
            raise InvalidRequest(
                "input: there is nothing to answer but thoughts; add a message", field="input", reason="INVALID_VALUE"
            )
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"input: {len(messages)} messages with the instructions: at most {MAX_MESSAGES}; send fewer",
                field="input",
                reason="INVALID_VALUE",
            )
        return messages


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "".join(part.text for part in text)
