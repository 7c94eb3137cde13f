"""The body of a conversation: messages, tools, and variables of the chat template."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from services.common.json_scan import MAX_VALUES
from services.common.large_json import count_marks
from services.gateway.openai.body import Body, optional
from services.gateway.openai.json_value import BoundedValue, Schema

# Far more than clients use. They limit the time to validate one body.
MAX_MESSAGES = 65_536
MAX_PARTS = 4096
MAX_TOOLS = 1024
MAX_CALLS = 1024
MAX_DOCUMENTS = 4096
MAX_TEMPLATE_VARIABLES = 64

# Variables of chat templates that have their own parameters.
_NOT_VARIABLES = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
)  # fmt: skip

# Members of a message that change the answers of other servers. This server would ignore them.
_UNSUPPORTED_PARTS = ("function_call", "audio", "refusal", "reasoning", "images", "videos")
_UNSUPPORTED_MARKS = ("prefix", "partial")

T = TypeVar("T")
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusals_are_text(cls, part: Any) -> Any:
        """Replace OpenAI's part of type ``refusal`` by a text part."""
        if isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part:
            return {"type": "text", "text": part["refusal"]}
        return part


class CalledFunction(Body):
    """The function of a tool call, and its arguments."""

    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")

    def render(self) -> dict[str, Any]:
        """Return the function in the form of chat templates: arguments that are a JSON object are parsed."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class PastCall(Body):
    """A tool call that the model made in an earlier turn."""

    nested: ClassVar[tuple[str, ...]] = ("function",)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def render(self) -> dict[str, Any]:
        """Return the call in the form of chat templates."""
        return {"id": self.id or "", "type": self.type, "function": self.function.render()}


class Message(Body):
    """A message of a conversation."""

    nested: ClassVar[tuple[str, ...]] = ("content", "tool_calls")
    consulted = frozenset((*_UNSUPPORTED_PARTS, *_UNSUPPORTED_MARKS))

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_CALLS)] | None = optional(
        "Calls in a message of the assistant."
    )
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None,
        Field(validate_default=True, description="A text, or parts of type text."),
    ] = None
    name: str | None = None
    tool_call_id: str | None = optional("Id of the call whose output a message of role tool has.")
    reasoning_content: str | None = optional("The assistant's reasoning.")

    @model_validator(mode="before")
    @classmethod
    def _as_answers_have_it(cls, message: Any) -> Any:
        """Accept an assistant's message in the form of an answer, with ``refusal``, ``reasoning`` or null content.

        A refusal becomes the content, and ``reasoning``, vLLM's name, becomes ``reasoning_content``.
        """
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return message
        taken = dict(message)
        refusal, reasoning = taken.pop("refusal", None), taken.pop("reasoning", None)
        if refusal and taken.get("content"):
            raise ValueError("a message has either 'content' or 'refusal'; leave one of them out")
        if refusal is not None and not isinstance(refusal, str):
            raise ValueError("'refusal' is the text of a refusal; send a string, or leave it out")
        calls_only = bool(taken.get("tool_calls"))
        if refusal or ("content" in taken and taken["content"] is None and not calls_only):
            taken["content"] = refusal or ""
        if taken.get("reasoning_content") is None and reasoning is not None:
            taken["reasoning_content"] = reasoning
        return taken

    @field_validator("tool_calls")
    @classmethod
    def _only_the_assistant_calls(cls, calls: list[PastCall] | None, info: ValidationInfo) -> list[PastCall] | None:
        if calls and info.data.get("role", "assistant") != "assistant":
            raise ValueError("only messages of the assistant have tool calls")
        return calls

    @field_validator("content")
    @classmethod
    def _something_is_said(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls") and {"role", "tool_calls"} <= info.data.keys():
            raise PydanticCustomError("missing", "Field required")
        return content

    @model_validator(mode="after")
    def _nothing_that_changes_the_answer(self) -> "Message":
        extras = self.model_extra or {}
        for name in _UNSUPPORTED_PARTS:
            if extras.get(name):
                raise ValueError(f"messages with {name!r} are not supported by this server yet; leave them out")
        for name in _UNSUPPORTED_MARKS:
            if extras.get(name):
                raise ValueError(f"a message with {name!r} is not continued here; send continue_final_message=true")
        return self

    @property
    def text(self) -> str:
        """The text of the message. Its parts are joined."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    def render(self) -> dict[str, Any]:
        """Return the message in the form of chat templates, which know OpenAI's role ``developer`` as ``system``."""
        rendered: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            rendered["tool_calls"] = [call.render() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                rendered[name] = value
        return rendered


class OpenBody(Body):
    """A JSON object whose unknown members are kept with their values, since the model gets them."""

    # Without ``init=False``, type checkers take it for a parameter.
    __pydantic_extra__: dict[str, BoundedValue] = Field(init=False)

    def model_post_init(self, context: Any, /) -> None:
        """Keep all values."""


class Function(OpenBody):
    """The name, the description and the parameters of a tool."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = optional("JSON Schema of the arguments.")
    strict: bool | None = optional(
        "true: the arguments always match parameters, even if the model decides to call the function."
    )


class Tool(OpenBody):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def render(self) -> dict[str, Any]:
        """Return the tool in the form of chat templates, without ``strict``, which is for the server."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class NamedFunction(Body):
    """A tool by its name."""

    name: str


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def unique_names(names_of: Callable[[Sequence[T]], Iterable[str]]) -> AfterValidator:
    """Return the check that no two tools of a list have the same name. ``names_of``: the names of the list's tools."""

    def check(tools: list[T]) -> list[T]:
        for name, count in Counter(names_of(tools)).items():
            if count > 1:
                raise ValueError(f"two tools have the name {name!r}; give each its own")
        return tools

    return AfterValidator(check)


class AllowedFunctions(Body):
    """Tools by their names, and whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, description="Tools of the request, by name.")
    ]


class AllowedTools(Body):
    """The tools of a request that the model may call. The others are left out."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template. Raises ``ValueError`` for a variable that has its own parameter."""
    for name in _NOT_VARIABLES:
        if name in variables:
            raise ValueError(f"{name!r} is no variable; leave it out here, and send the parameter of this name")
    return variables


Variables = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES), AfterValidator(_check_variables)]
Tools = Annotated[
    list[Tool], Field(max_length=MAX_TOOLS), unique_names(lambda tools: [tool.function.name for tool in tools])
]


class ConversationBody(Body):
    """The fields of every body whose messages the chat template renders."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation, in order.")
    ]
    tools: Tools | None = optional("Functions that the model may call.")
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = optional(
        "Documents for chat templates that take them. Other templates reject them."
    )
    add_generation_prompt: bool | None = optional("true: the chat template opens the assistant's turn. Default: true.")
    continue_final_message: bool | None = optional("true: the answer continues the assistant's last message.")
    _only_allowed: bool = PrivateAttr(default=False)
    chat_template_kwargs: Variables | None = optional("Variables of the chat template, such as enable_thinking.")

    @field_validator("messages")
    @classmethod
    def _arguments_are_bounded(cls, messages: list[Message]) -> list[Message]:
        """Reject arguments of tool calls with too many JSON values, which are in strings and not counted elsewhere."""
        marks = sum(
            count_marks(call.function.arguments.encode(errors="replace"))
            for message in messages
            for call in message.tool_calls or ()
        )
        if marks > MAX_VALUES:
            raise ValueError(f"the arguments of tool calls have more than {MAX_VALUES} values; send fewer")
        return messages

    @property
    def effort(self) -> ReasoningEffort | None:
        """The reasoning effort that the chat template gets."""
        return None

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the chat template gets."""
        return self.tools or []

    @property
    def only_allowed(self) -> bool:
        """True if the model may only call ``tools``, even if the conversation mentions others."""
        return self._only_allowed

    @property
    def continued(self) -> str | None:
        """Text of the assistant's last message if the answer continues it, or None."""
        return self.messages[-1].text if self.continue_final_message else None

    @model_validator(mode="after")
    def _last_message_can_be_continued(self) -> "ConversationBody":
        if not self.continue_final_message or not self.messages:
            return self
        if self.add_generation_prompt:
            raise ValueError(
                "continue_final_message: an answer cannot both continue the last message and begin a new one; leave"
                " add_generation_prompt out, or set it to false"
            )
        if self.messages[-1].role != "assistant" or not self.messages[-1].text:
            raise ValueError("continue_final_message: expected a last message of the assistant that has text")
        return self
