"""Truncation of a conversation to the context: whole messages are dropped, the oldest first."""

from collections.abc import Sequence
from functools import partial

from services.common.errors import InvalidRequest
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.text import TextEngine
from services.gateway.openai.conversation import Prompt, render
from services.gateway.openai.limits import DEFAULT_ANSWER_TOKENS, Limits, default_max_tokens
from services.gateway.openai.messages import Message
from services.gateway.openai.schemas import ChatBody


async def render_prompt(
    text: TextEngine, limits: Limits, body: ChatBody, facts: ModelFacts, max_tokens: int | None, *, drop_oldest: bool
) -> Prompt:
    """Return the prompt of ``body``. With ``drop_oldest``, drop the oldest messages if it exceeds the context.

    They make room for the answer. If even the prompt without all ``droppable`` messages leaves too little room, return
    it, since a shorter answer may fit. Raises ``InvalidRequest``, also for a prompt of more than ``max_tokens`` tokens
    unless that is None.
    """
    if not drop_oldest:
        return await render(text, body, max_tokens=max_tokens)
    whole_room, room = _max_prompt_tokens(limits, body, facts)

    async def render_if_fits(given: ChatBody, room: int = room) -> Prompt | None:
        try:
            prompt = await render(text, given, max_tokens=room)
        except InvalidRequest as error:
            if error.reason != "CONTEXT_LENGTH_EXCEEDED":
                raise
            return None
        return prompt if len(prompt.ids) <= room else None

    if (prompt := await render_if_fits(body, whole_room)) is not None:
        return prompt
    parts = await text.in_thread(droppable, body.messages)
    newest = partial(text.in_thread, _without, body)
    shortest = await newest(parts)
    if (best := await render_if_fits(shortest)) is None:
        return await render(text, shortest, max_tokens=max_tokens)
    # Search for the number of parts to keep. The steps double before the binary search. A conversation much longer than
    # the context is therefore rendered as a whole only once.
    fits, exceeds, step = 0, len(parts), 1
    while exceeds - fits > 1:
        count = min(fits + step, (fits + exceeds) // 2)
        if (prompt := await render_if_fits(await newest(parts[: len(parts) - count]))) is None:
            exceeds, step = count, exceeds
        else:
            best, fits, step = prompt, count, 2 * step
    return best


def _without(body: ChatBody, dropped: Sequence[set[int]]) -> ChatBody:
    indices = set[int]().union(*dropped)
    messages = [message for index, message in enumerate(body.messages) if index not in indices]
    return body.model_copy(update={"messages": messages})


def _max_prompt_tokens(limits: Limits, body: ChatBody, facts: ModelFacts) -> tuple[int, int]:
    """Return the maximum number of tokens of a prompt that is not truncated, and of a truncated prompt.

    The first leaves room for a short answer. The second leaves room for the answer that the body allows, up to half of
    the context. Both leave room for ``min_tokens``.
    """
    context, least = facts.max_context_tokens, body.min_tokens or 0
    max_tokens = limits.max_tokens(body, default_max_tokens(body, facts))
    answer = DEFAULT_ANSWER_TOKENS if max_tokens is None else max_tokens
    rooms = min(answer, DEFAULT_ANSWER_TOKENS), min(answer, context // 2)
    whole, truncated = (context - max(room, least) for room in rooms)
    if limits.prompt_tokens is None:
        return whole, truncated
    return min(whole, limits.prompt_tokens), min(truncated, limits.prompt_tokens)


def droppable(messages: Sequence[Message]) -> list[set[int]]:
    """Return the parts of a conversation that may be dropped, the oldest first, as indices of messages.

    A part is a message of the user with all messages before the user's next one. The remaining conversation therefore
    begins with the user. After the last message of the user, each message is a part. The outputs of a call belong to
    the part of the call. No part has messages of the system or the developer, the last message of the user, or the last
    message of all with its call.
    """
    last_question = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
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
    """Return the indices of messages that belong together: each message with the outputs of its calls."""
    units: list[list[int]] = []
    callers: dict[str | None, list[int]] = {}
    for index, message in enumerate(messages):
        if message.role == "tool" and (unit := callers.get(message.tool_call_id)) is not None:
            unit.append(index)
            continue
        unit = [index]
        units.append(unit)
        callers.update((call.id, unit) for call in message.tool_calls or ())
    return units
