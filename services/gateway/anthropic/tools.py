"""The tools of a Messages request, and the same tools in the shape of chat completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from services.gateway.openai.body import Body, optional
from services.gateway.openai.json_value import Schema
from services.gateway.openai.messages import Function, NamedFunction, NamedTool, Tool
from services.gateway.openai.messages import ToolChoice as ChatToolChoice

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class LongNamedFunction(Function):
    """A function of chat completions with the maximum name length of Anthropic's API."""

    name: ToolName


class _CustomType(Body):
    """The type of a tool, which is checked before its other fields."""

    type: Literal["custom"] | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _only_custom(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(
                f"{kind[:64]!r} is a tool that Anthropic defines or runs; this server supports only tools with a name"
                " and an input_schema; leave it out"
            )
        return kind


class MessagesTool(_CustomType):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    input_schema: Schema = Field(description="JSON Schema of the input.")
    strict: bool | None = optional(
        "true: the input always matches input_schema, even if the model decides to call the tool."
    )
    defer_loading: Literal[False] | None = optional("true is rejected.")
    allowed_callers: list[Literal["direct"]] | None = optional("direct. Other callers are rejected.")
    input_examples: list[Any] | None = optional("Rejected unless it is empty.")
    cache_control: Any = optional("Accepted: every prompt is cached.")
    eager_input_streaming: Any = optional("Accepted: input is always streamed while it is generated.")

    @field_validator("input_examples")
    @classmethod
    def _no_examples(cls, examples: list[Any] | None) -> list[Any] | None:
        if examples:
            raise ValueError("chat templates do not support examples of input; put them into the tool's description")
        return examples

    def chat(self) -> Tool:
        """Return the same tool in the shape of chat completions."""
        function = LongNamedFunction(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class MessagesToolChoice(Body):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = optional("true: allow at most one call.")

    @model_validator(mode="after")
    def _name_with_its_type(self) -> "MessagesToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("'name' is given with type 'tool', and with no other type")
        return self

    def chat(self) -> ChatToolChoice:
        """Return the same choice in the shape of chat completions."""
        if self.name is not None:
            return NamedTool(type="function", function=NamedFunction(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"
