"""The input items of ``/v1/responses``, and their translation to chat messages."""

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from services.gateway.openai.body import Body, Id, optional
from services.gateway.openai.messages import MAX_PARTS, CalledFunction, Message, PastCall
from services.gateway.openai.responses.tools import INPUT, LOCAL_SHELL, qualified

# Prefix of ``encrypted_content`` in this server's reasoning items. The rest is the reasoning as UTF-8 in base64.
_SEALED = "toka-reasoning-1."


class InputPart(Body):
    """A part of a text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Text = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


class InputMessage(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class InputCall(Body):
    """A function call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def past_call(self) -> PastCall:
        """Return the call as chat completions have it."""
        return _past_call(self.call_id, qualified(self.namespace, self.name), self.arguments)


class InputCallOutput(Body):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class InputCustomCall(Body):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def past_call(self) -> PastCall:
        """Return the call as chat completions have it."""
        return _past_call(self.call_id, qualified(self.namespace, self.name), json.dumps({INPUT: self.input}))


class InputCustomCallOutput(Body):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Text


class ShellAction(Body):
    """The command of a shell call."""

    type: Literal["exec"]
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None


class InputShellCall(Body):
    """A shell call that the model made."""

    type: Literal["local_shell_call"]
    call_id: str
    action: ShellAction

    def past_call(self) -> PastCall:
        """Return the call as chat completions have it."""
        given = self.action.model_dump(exclude={"type"}, exclude_none=True)
        known = {name: value for name, value in given.items() if name in ShellAction.model_fields}
        return _past_call(self.call_id, LOCAL_SHELL, json.dumps(known))


class InputShellCallOutput(Body):
    """The result of a shell call. ``id`` is the call's ``call_id``."""

    type: Literal["local_shell_call_output"]
    id: str
    output: str

    @property
    def call_id(self) -> str:
        """Id of the call whose result this is."""
        return self.id


class ReasoningPart(Body):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """The model's reasoning in an earlier turn."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = optional("As this server wrote it. Read if there is no content.")

    @field_validator("encrypted_content")
    @classmethod
    def _can_be_opened(cls, sealed: str | None) -> str | None:
        if sealed is not None:
            _opened(sealed)
        return sealed

    @property
    def text(self) -> str:
        """Text of the reasoning, or its summary if there is no text."""
        if self.content:
            return joined(self.content)
        return _opened(self.encrypted_content) if self.encrypted_content else joined(self.summary or [])


class ItemReference(Body):
    """A reference to a stored item. The item replaces it before the input is translated."""

    type: Literal["item_reference"] | None = None
    id: Id = Field(description="Id of an output item of a stored response, or of an item earlier in input.")


def _tag(item: Any) -> str:
    """Return the tag of an item's class. Tags begin with #, so that error messages do not name them as parameters."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return "#item_reference" if isinstance(item, ItemReference) or _has_only_id(item) else "#message"
    # A value of another type may be nested deeply, so its text is not part of the tag.
    return f"#{kind if isinstance(kind, str) else type(kind).__name__}"


def _has_only_id(item: Any) -> bool:
    return isinstance(item, dict) and {"id"} <= item.keys() <= {"id", "type"}


Item = Annotated[
    Annotated[InputMessage, Tag("#message")]
    | Annotated[InputCall, Tag("#function_call")]
    | Annotated[InputCallOutput, Tag("#function_call_output")]
    | Annotated[InputCustomCall, Tag("#custom_tool_call")]
    | Annotated[InputCustomCallOutput, Tag("#custom_tool_call_output")]
    | Annotated[InputShellCall, Tag("#local_shell_call")]
    | Annotated[InputShellCallOutput, Tag("#local_shell_call_output")]
    | Annotated[InputReasoning, Tag("#reasoning")]
    | Annotated[ItemReference, Tag("#item_reference")],
    Discriminator(_tag),
]


def messages_of(items: Iterable[Any]) -> list[Message]:
    """Return the chat messages of ``items``.

    Reasoning and calls become parts of the assistant's message. Item references must have been replaced.
    """
    messages: list[Message] = []
    reasoning, message = None, None  # message: the assistant's last message, which the next calls belong to
    for item in items:
        match item:
            case InputReasoning():
                reasoning, message = item.text, None
            case InputCall() | InputCustomCall() | InputShellCall():
                if message is None:
                    message = Message(role="assistant", content="", reasoning_content=reasoning, tool_calls=[])
                    messages.append(message)
                message.tool_calls = [*(message.tool_calls or []), item.past_call()]
                reasoning = None
            case InputCallOutput() | InputCustomCallOutput() | InputShellCallOutput():
                messages.append(Message(role="tool", content=joined(item.output), tool_call_id=item.call_id))
                message = None
            case InputMessage(role="assistant"):
                message = Message(role="assistant", content=joined(item.content), reasoning_content=reasoning)
                messages.append(message)
                reasoning = None
            case InputMessage():
                messages.append(Message(role=item.role, content=joined(item.content)))
                message = None
    return messages


def joined(text: Any) -> str:
    """Return a text, or the joined texts of its parts."""
    return text if isinstance(text, str) else "".join(part.text for part in text)


def sealed(reasoning: str) -> str:
    """Return ``encrypted_content`` of a reasoning item. It is not secret, because the item also has the text."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _opened(content: str) -> str:
    """Return the reasoning in ``content``. Raises ``ValueError`` if this server did not write it."""
    try:
        if not content.startswith(_SEALED):
            raise ValueError("another prefix")
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (ValueError, binascii.Error):
        raise ValueError("this server did not write it, and cannot read it; leave the reasoning item out") from None


def _past_call(call_id: str, name: str, arguments: str) -> PastCall:
    return PastCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))
