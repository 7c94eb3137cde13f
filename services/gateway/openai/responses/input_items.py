"""The input items of ``/v1/responses``, their translation to chat messages, and the form in which they are stored."""

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag, field_validator

from services.common.errors import FailedPrecondition
from services.gateway.openai.body import Body, Id, optional
from services.gateway.openai.messages import MAX_PARTS, CalledFunction, Message, PastCall
from services.gateway.openai.responses.tools import INPUT, LOCAL_SHELL, qualified
from services.gateway.store.ids import new_id

# Prefix of ``encrypted_content`` in this server's reasoning items. The rest is the reasoning as UTF-8 in base64.
_SEALED = "toka-reasoning-1."
_PREFIXES = {  # of the ids of stored items
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "local_shell_call": "lsh_",
    "local_shell_call_output": "lsho_",
}


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


def stored(item: Any) -> dict[str, Any]:
    """Return an input item in the form in which it is stored, with its own id or a new one."""
    kept: dict[str, Any]
    match item:
        case InputMessage(role=role):
            kind = "output_text" if role == "assistant" else "input_text"
            texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
            more: dict[str, Any] = {"annotations": []} if role == "assistant" else {}
            parts = [{"type": kind, "text": text, **more} for text in texts]
            kept = {"type": "message", "status": "completed", "role": role, "content": parts}
        case InputCall():
            kept = _call(item) | {"name": item.name, "arguments": item.arguments} | _namespace(item)
        case InputCustomCall():
            kept = _call(item) | {"name": item.name, "input": item.input} | _namespace(item)
        case InputShellCall():
            kept = _call(item) | {"action": {"env": {}} | item.action.model_dump(exclude_none=True)}
        case InputShellCallOutput():
            return {"id": item.id, "type": item.type, "status": "completed", "output": item.output}
        case InputCallOutput() | InputCustomCallOutput():
            output = item.output if isinstance(item.output, str) else [_part(part) for part in item.output]
            kept = {"type": item.type, "status": "completed", "call_id": item.call_id, "output": output}
        case InputReasoning():
            kept = {"type": item.type, "summary": [_part(part) for part in item.summary or ()]}
            if item.content is not None:
                kept["content"] = [_part(part) for part in item.content]
            elif item.encrypted_content is not None:
                kept["encrypted_content"] = item.encrypted_content
        case _:
            raise FailedPrecondition(f"an item of type {item.type!r} cannot be stored; send store=false")
    given = (item.model_extra or {}).get("id")
    return {"id": given if isinstance(given, str) and given else new_id(_PREFIXES[kept["type"]]), **kept}


def all_stored(earlier: Iterable[dict[str, Any]], given: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the stored items ``earlier`` and the input items ``given``, each with a unique id."""
    items: dict[str, dict[str, Any]] = {}
    for item in (*earlier, *map(stored, given)):
        name = item["id"]
        if name in items:
            name = new_id(_PREFIXES[item["type"]])
        items[name] = item | {"id": name}
    return list(items.values())


def outputs(bodies: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the output items of responses, as parts of a later conversation."""
    return [without_logprobs(item) for body in bodies for item in orjson.loads(body)["output"]]


def without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Return an output item without its log-probabilities, which are many times larger than its text."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def _call(item: Any) -> dict[str, Any]:
    return {"type": item.type, "status": "completed", "call_id": item.call_id}


def _namespace(item: Any) -> dict[str, Any]:
    return {"namespace": item.namespace} if item.namespace else {}


def _part(part: Any) -> dict[str, Any]:
    return {"type": part.type, "text": part.text}


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
