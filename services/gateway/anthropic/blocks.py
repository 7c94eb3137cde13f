"""The content blocks and turns of a Messages request."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from services.gateway.openai.body import Body, optional
from services.gateway.openai.messages import MAX_PARTS

_SUPPORTED = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class TextBlock(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None  # from an answer of another provider


class ThinkingBlock(Body):
    """The model's reasoning in an earlier turn. ``signature`` is opaque and is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Encrypted reasoning of another provider. No model here can read it, so it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A tool call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


def _text_block(value: Any) -> Any:
    """Return ``value``. Raises ValueError if it is a block of another type than text."""
    kind = value.get("type") if isinstance(value, dict) else "text"
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"a block of type {kind[:64]!r} is not supported here, only text; leave it out")
    return value


def _block(value: Any) -> Any:
    """Return ``value``. Raises ValueError if it is a block of an unsupported type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _SUPPORTED:
        raise ValueError(
            f"a block of type {kind[:64]!r} is not supported by this server, only text, thinking, tool_use and"
            " tool_result; leave it out"
        )
    return value


def _as_blocks(value: Any) -> Any:
    """Return a string as a list of one text block, and anything else unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _tag(block: Any) -> str:
    """Return the tag of a block's type. Tags begin with #, which parameter names never do."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"#{kind if isinstance(kind, str) else 'text'}"


TextBlocks = Annotated[
    list[Annotated[TextBlock, BeforeValidator(_text_block)]],
    Field(max_length=MAX_PARTS),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(Body):
    """The result of a tool call."""

    nested: ClassVar[tuple[str, ...]] = ("content",)

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = optional("true: the text begins with Error:")
    cache_control: Any = None


Block = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[RedactedThinkingBlock, Tag("#redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("#tool_use")]
    | Annotated[ToolResultBlock, Tag("#tool_result")],
    Discriminator(_tag),
]


class Turn(Body):
    """A message of the conversation."""

    nested: ClassVar[tuple[str, ...]] = ("content",)

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[Block, BeforeValidator(_block)]],
        Field(max_length=MAX_PARTS, description="A text, or blocks of type text, thinking, tool_use and tool_result."),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
    ]
