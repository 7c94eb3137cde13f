"""The prompt of a request as token ids."""

import numpy as np

from services.common.errors import InvalidRequest
from services.common.packed import read_fixed32
from services.common.text.tokenizer import Tokenizer
from services.scheduler.api.model import ServedModel
from tokasaurus.scheduler.v1 import generate_pb2


def needs_tokenizing(message: generate_pb2.GenerateRequest) -> bool:
    """Whether ``read_prompt`` takes long enough to leave the event loop for."""
    return message.WhichOneof("prompt") in ("text", "chat")


def read_prompt(message: generate_pb2.GenerateRequest, model: ServedModel) -> np.ndarray:
    """uint32 ``[tokens]``, at least one, all in the vocabulary. Raises ``InvalidRequest`` naming the field."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the request has no prompt: set tokens, text or chat", field="prompt")
    if kind == "tokens":
        tokens = read_fixed32(message.tokens.token_ids)
        check_tokens(tokens, model.card.vocab_size, "tokens.token_ids")
        field = "tokens.token_ids"
    else:
        tokenizer = model.tokenizer
        field = "text" if kind == "text" else "chat.messages"
        ids = tokenizer.encode(message.text) if kind == "text" else encode_chat(tokenizer, message.chat, field)
        tokens = np.array(ids, np.uint32)
    if len(tokens) == 0:
        raise InvalidRequest("the prompt is empty: at least one token is needed", field=field)
    return tokens


def encode_chat(tokenizer: Tokenizer, chat: generate_pb2.ChatPrompt, field: str) -> list[int]:
    """Token ids of a conversation under the model's template."""
    if not chat.messages:
        raise InvalidRequest("the chat has no messages", field=field)
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest("a message has no role", field=f"{field}[{index}].role")
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        return tokenizer.encode_chat(messages, opens)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=field, reason=error.reason) from error


def check_tokens(tokens: np.ndarray, vocab_size: int, field: str) -> None:
    """``InvalidRequest`` for the first id that is not in the vocabulary."""
    if tokens.max(initial=0) >= vocab_size:
        index = int((tokens >= vocab_size).argmax())
        raise InvalidRequest(
            f"token id {int(tokens[index])} is not in the vocabulary of {vocab_size} tokens", field=f"{field}[{index}]"
        )
