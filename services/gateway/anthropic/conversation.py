"""The turns of a Messages request as messages of chat completions."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from services.common.errors import InvalidRequest, InvalidValue
from services.common.text.chat_template import ChatTemplate
from services.gateway.anthropic.blocks import (
    Block,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from services.gateway.openai.body import Body
from services.gateway.openai.json_value import write_again
from services.gateway.openai.messages import MAX_MESSAGES, CalledFunction, Message, PastCall

# The first system block of Claude Code. It differs in each request, so it would prevent prefix caching.
_BILLING_HEADER = "x-anthropic-billing-header:"
_PROBE = "a late system message"


class ModelTraits(NamedTuple):
    """The properties of a model that decide how a Messages request is translated."""

    variables: Collection[str]  # of the chat template
    late_system: bool = True  # the chat template supports system messages after other messages
    reasoning: bool = False  # answers may begin with a reasoning section
    thinking_budgets: bool = False  # the length of that section can be limited


@lru_cache(maxsize=8)
def shows_late_system(template: ChatTemplate) -> bool:
    """Return whether ``template`` renders a system message after another message."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": _PROBE}]
    try:
        return _PROBE in template.render(messages, add_generation_prompt=True)
    except InvalidRequest:
        return False


_BLOCKS: dict[str, tuple[type[Body], ...]] = {  # that a turn of a role may have
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}


def chat_messages(
    system: Sequence[TextBlock] | None, turns: Sequence[Turn], *, late_system: bool = True
) -> list[Message]:
    """Return the conversation as messages of chat completions. Raises InvalidRequest.

    Consecutive turns of one role become one message, and system turns at the beginning become part of ``system``. A
    tool result becomes a message of the role ``tool``. Text blocks of the user and the system are joined by newlines.
    Those of the assistant are joined as they are. Without ``late_system`` a later system turn becomes text of the user.
    """
    _check_blocks(turns)
    instructions: list[Block] = [block for block in system or () if not block.text.startswith(_BILLING_HEADER)]
    messages: list[Message] = []
    tool_names: dict[str, str] = {}  # by the id of the call
    at_beginning = True
    for role, group in groupby(_in_roles(turns, late_system), lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.content]
        if role == "assistant":
            messages.append(_assistant(blocks, tool_names))
        elif role == "user":
            messages += _user(blocks, tool_names)
        elif at_beginning:
            instructions += blocks
        else:
            messages.append(Message(role="system", content=_lines(blocks)))
        at_beginning = False
    if instructions:
        messages.insert(0, Message(role="system", content=_lines(instructions)))
    if not messages:
        raise InvalidRequest.at("messages", "there is no content to answer; add text")
    if len(messages) > MAX_MESSAGES:
        raise InvalidValue.at(
            "messages", f"{len(messages)} messages, with each tool result as one: at most {MAX_MESSAGES}; send fewer"
        )
    return messages


def _check_blocks(turns: Sequence[Turn]) -> None:
    """Raise InvalidRequest for a block in a turn of the wrong role."""
    for number, turn in enumerate(turns):
        for place, block in enumerate(turn.content):
            if not isinstance(block, _BLOCKS[turn.role]):
                problem = f"a turn of the {turn.role} has no blocks of type {block.type!r}"
                path = f"messages[{number}].content[{place}]"
                raise InvalidValue.at(path, f"{problem}; move it to the turn it belongs to")


def _in_roles(turns: Sequence[Turn], late_system: bool) -> Iterable[Turn]:
    """Yield the turns in roles that the template supports."""
    at_beginning = True
    for turn in turns:
        at_beginning = at_beginning and turn.role == "system"
        if turn.role != "system" or at_beginning or late_system:
            yield turn
            continue
        text = f"<system-reminder>\n{_lines(turn.content)}\n</system-reminder>"
        yield turn.model_copy(update={"role": "user", "content": [TextBlock(type="text", text=text)]})


def check_prefill(message: Message) -> None:
    """Check that an answer can continue the last message, which is the assistant's. Raises InvalidRequest."""
    if message.tool_calls or not message.text:
        problem = "calls a tool: add a turn of the user with the tool_result" if message.tool_calls else "has no text"
        raise InvalidValue.at(
            "messages", f"the last turn is the assistant's, so the answer would continue it, but it {problem}"
        )


def _assistant(blocks: Iterable[Block], tool_names: dict[str, str]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                tool_names[block.id] = block.name
                function = CalledFunction(name=block.name, arguments=write_again(block.input).decode())
                calls.append(PastCall(id=block.id, function=function))
    reasoning = "\n".join(thought for thought in thoughts if thought)
    return Message(
        role="assistant", content="".join(texts), reasoning_content=reasoning or None, tool_calls=calls or None
    )


def _user(blocks: Iterable[Block], tool_names: dict[str, str]) -> list[Message]:
    messages = []
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            messages += [_result(block, tool_names) for block in group if isinstance(block, ToolResultBlock)]
        else:
            messages.append(Message(role="user", content=_lines(group)))
    return messages


def _result(block: ToolResultBlock, tool_names: dict[str, str]) -> Message:
    text = _lines(block.content or ())
    return Message(
        role="tool",
        content=f"Error: {text}" if block.is_error else text,
        tool_call_id=block.tool_use_id,
        name=tool_names.get(block.tool_use_id),
    )


def _lines(blocks: Iterable[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
