"""Truncation of a conversation to the context: whole messages are dropped, the oldest first."""

from collections.abc import Sequence
from functools import partial

from services.common.config import GatewayConfig
from services.common.errors import InvalidRequest
from services.gateway.gateway import Gateway
from services.gateway.openai.conversation import Prompt, render
from services.gateway.openai.jobs import UNSAID_ANSWER, check_max_tokens, default_max_tokens
from services.gateway.openai.messages import Message
from services.gateway.openai.schemas import ChatBody
from services.gateway.session.codec import ModelFacts


async def render_whole(gateway: Gateway, body: ChatBody, max_tokens: int | None) -> Prompt:
    """Return the prompt of ``body``. Raises ``InvalidRequest``, also for more than ``max_tokens`` unless it is None."""
    with_tools = body.tool_choice != "none"
    return await render(gateway.text, body, max_tokens=max_tokens, effort=body.reasoning_effort, with_tools=with_tools)


async def render_newest(gateway: Gateway, body: ChatBody, facts: ModelFacts, max_tokens: int | None) -> Prompt:
    """Return the prompt of ``body``, without its oldest messages if they leave no room for the answer.

    If the prompt is still too long without all ``droppable`` messages, return that one unless it has more than
    ``max_tokens``: a shorter answer may fit. Raises ``InvalidRequest``.
    """
    room = _room(gateway.config, body, facts)

    async def fitting(given: ChatBody) -> Prompt | None:
        try:
            prompt = await render_whole(gateway, given, room)
        except InvalidRequest as error:
            if error.reason != "CONTEXT_LENGTH_EXCEEDED":
                raise
            return None
        return prompt if len(prompt.ids) <= room else None

    if (prompt := await fitting(body)) is not None:
        return prompt
    parts = await gateway.text.in_thread(droppable, body.messages)
    newest = partial(gateway.text.in_thread, _without, body)
    shortest = await newest(parts)
    if (best := await fitting(shortest)) is None:
        return await render_whole(gateway, shortest, max_tokens)
    # Binary search for the longest prompt. The first steps double: a conversation much longer than the context is
    # rendered as a whole only once.
    fits, exceeds, step = 0, len(parts), 1
    while exceeds - fits > 1:
        count = min(fits + step, (fits + exceeds) // 2)
        if (prompt := await fitting(await newest(parts[: len(parts) - count]))) is None:
            exceeds, step = count, exceeds
        else:
            best, fits, step = prompt, count, 2 * step
    return best


def _without(body: ChatBody, dropped: Sequence[set[int]]) -> ChatBody:
    places = set[int]().union(*dropped)
    messages = [message for place, message in enumerate(body.messages) if place not in places]
    return body.model_copy(update={"messages": messages})


def _room(config: GatewayConfig, body: ChatBody, facts: ModelFacts) -> int:
    """Return the most tokens of a truncated prompt. The answer gets at most half of the context."""
    most = check_max_tokens(body, config.max_output_tokens, default_max_tokens(body, facts))
    answer = max(UNSAID_ANSWER if most is None else most, body.min_tokens or 0)
    room = facts.max_context_tokens - min(answer, facts.max_context_tokens // 2)
    return room if config.max_prompt_tokens is None else min(room, config.max_prompt_tokens)


def droppable(messages: Sequence[Message]) -> list[set[int]]:
    """Return the parts of a conversation that may be dropped, the oldest first, as places of messages.

    A part is a turn, from one message of the user to the next, so that what stays begins with the user. Behind the
    last message of the user, a part is one message. The outputs of a call are in the part of the call. Messages of the
    system and the developer, the last one of the user, and the last one of all, with its call, are in no part.
    """
    last_question = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
    parts: list[set[int]] = []
    for unit in _units(messages):
        first = messages[unit[0]]
        if first.role in ("system", "developer") or last_question in unit or len(messages) - 1 in unit:
            continue
        if not parts or first.role == "user" or unit[0] > last_question:
            parts.append(set())
        parts[-1].update(unit)
    return parts


def _units(messages: Sequence[Message]) -> list[list[int]]:
    """Return the places of messages that belong together: each message, with the outputs of its calls."""
    units: list[list[int]] = []
    callers: dict[str | None, list[int]] = {}
    for place, message in enumerate(messages):
        if message.role == "tool" and (unit := callers.get(message.tool_call_id)) is not None:
            unit.append(place)
            continue
        unit = [place]
        units.append(unit)
        callers.update((call.id, unit) for call in message.tool_calls or ())
    return units
