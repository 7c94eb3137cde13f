"""Reads the prompt of a request as token ids."""

import numpy as np

from services.common.errors import InvalidRequest
from services.common.packed import read_fixed32
from services.scheduler.api.model import ServedModel
from tokasaurus.scheduler.v1 import generate_pb2


def is_text(message: generate_pb2.GenerateRequest) -> bool:
    """Return whether the prompt is text. Then the answer is text too by default."""
    return message.WhichOneof("prompt") in ("text", "chat")


async def read_prompt(message: generate_pb2.GenerateRequest, model: ServedModel) -> np.ndarray:
    """Return the prompt as uint32 ``[tokens]``: at least one token, all in the vocabulary.

    Raises ``InvalidRequest`` naming the field, and ``Unavailable`` for a text before the context length is known.
    """
    match message.WhichOneof("prompt"):
        case "tokens":
            field = "tokens.token_ids"
            tokens = read_fixed32(message.tokens.token_ids)
            check_tokens(tokens, model.card.vocab_size, field)
        case "text":
            field = "text"
            tokens = await encode_text(model, message.text, field, max_tokens=model.shape.max_context_tokens)
        case "chat":
            field = "chat.messages"
            tokens = await encode_chat(model, message.chat, field, max_tokens=model.shape.max_context_tokens)
        case _:
            raise InvalidRequest("the request has no prompt: set tokens, text or chat", field="prompt")
    if len(tokens) == 0:
        raise InvalidRequest("the prompt is empty: at least one token is needed", field=field)
    return tokens


async def encode_text(
    model: ServedModel, text: str, field: str, *, max_tokens: int | None, add_special_tokens: bool = True
) -> np.ndarray:
    """Encode ``text`` as uint32 ``[tokens]``. ``max_tokens`` is that of ``TextEncoder``."""
    [ids] = await model.text.encode([text], max_tokens=max_tokens, field=field, add_special_tokens=add_special_tokens)
    return np.array(ids, np.uint32)


async def encode_chat(
    model: ServedModel, chat: generate_pb2.ChatPrompt, field: str, *, max_tokens: int | None
) -> np.ndarray:
    """Encode a conversation, rendered with the model's template, as uint32 ``[tokens]``."""
    if not chat.messages:
        raise InvalidRequest("the chat has no messages", field=field)
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest("a message has no role", field=f"{field}[{index}].role")
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True

    def render() -> str:
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        return model.tokenizer.render_chat(messages, opens)

    try:
        _, ids = await model.text.encode_chat(render, max_tokens=max_tokens, field=field)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=field, reason=error.reason) from error
    return np.array(ids, np.uint32)


def check_tokens(tokens: np.ndarray, vocab_size: int, field: str) -> None:
    """Raise ``InvalidRequest`` for the first id that is not in the vocabulary."""
    if tokens.max(initial=0) >= vocab_size:
        index = int((tokens >= vocab_size).argmax())
        raise InvalidRequest(
            f"token id {int(tokens[index])} is not in the vocabulary of {vocab_size} tokens", field=f"{field}[{index}]"
        )
