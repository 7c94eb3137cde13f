"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import orjson
from fastapi import Response
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from services.common.errors import InvalidRequest
from services.common.json_scan import Bulk
from services.common.text.encoder import MAX_TOKENS
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.body import Body, optional
from services.gateway.openai.conversation import render
from services.gateway.openai.fields import ModelName, TokenId
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.logprobs import TokenText
from services.gateway.openai.messages import MAX_MESSAGES, ConversationBody, Message
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import Router

_TOKEN_BYTES = 8  # approximate size of a token in the response
_PIECE = 16_384  # values that orjson writes in one call


class TokenizeBody(ConversationBody):
    """``POST /tokenize``: a text, or a conversation."""

    nested: ClassVar[tuple[str, ...]] = ("messages", "tools")

    model: ModelName = None
    prompt: str | None = optional("A text. Send either prompt or messages.")
    messages: Annotated[
        list[Message], Field(max_length=MAX_MESSAGES, default_factory=list, description="The conversation, in order.")
    ]
    add_special_tokens: bool | None = optional("false: add no special tokens, such as BOS, to a text.")
    return_token_strs: bool | None = optional("true: return token_strs.")

    @model_validator(mode="after")
    def _one_of_the_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: expected either prompt or messages")
        return self


def _list_or_array(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return the validated list of token ids, or the array that replaces it in a large body."""
    if not isinstance(value, np.ndarray):
        return validate(value)
    if len(value) > MAX_TOKENS:
        raise ValueError(f"expected at most {MAX_TOKENS} items (got {len(value)})")
    return value


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    bulks: ClassVar[Mapping[str, Bulk]] = {"tokens": Bulk()}

    model: ModelName = None
    tokens: Annotated[
        list[TokenId], Field(max_length=MAX_TOKENS, description="Token ids."), WrapValidator(_list_or_array)
    ]


router = Router()


@router.answer("/tokenize", TokenizeBody)
async def tokenize(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Return the token ids of a text or a conversation, which may be longer than the context."""
    body = await parse_large(gateway.text, posted, TokenizeBody)
    facts = await gateway.fleet.model(body.model)
    unknown = []
    if body.prompt is not None:
        [ids] = await gateway.text.encode(
            [body.prompt], max_tokens=None, field="prompt", add_special_tokens=body.add_special_tokens is not False
        )
    else:
        prompt = await render(gateway.text, body, max_tokens=None, add_special_tokens=bool(body.add_special_tokens))
        ids, unknown = prompt.ids, prompt.unknown
    token_text = gateway.text.token_text if body.return_token_strs else None
    content = await gateway.text.worked(len(ids) * _TOKEN_BYTES, _tokens, ids, facts.max_context_tokens, token_text)
    return _json(content, ignored_header(body, unknown))


@router.answer("/detokenize", DetokenizeBody)
async def detokenize(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Return the text of token ids, special tokens included."""
    body = await parse_large(gateway.text, posted, DetokenizeBody)
    facts = await gateway.fleet.model(body.model)
    await gateway.text.worked(len(body.tokens) * _TOKEN_BYTES, _check, body.tokens, facts.vocab_size)
    text = await gateway.text.decode(body.tokens, skip_special_tokens=False, field="tokens")
    return _json(await gateway.text.worked(len(text), orjson.dumps, {"prompt": text}), ignored_header(body))


def _check(tokens: list[int] | np.ndarray, vocab_size: int) -> None:
    wrong = np.flatnonzero(np.asarray(tokens, np.int64) >= vocab_size)
    if len(wrong):
        index = int(wrong[0])
        raise InvalidRequest(
            f"token id {tokens[index]} does not exist: this model has ids 0 to {vocab_size - 1}",
            field=f"tokens[{index}]",
            reason="UNKNOWN_TOKEN",
        )


def _tokens(ids: list[int], max_model_len: int, token_text: TokenText | None) -> bytes:
    strings = b"null" if token_text is None else _listed([token_text(token)[0] for token in ids])
    form = b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}'
    return form % (len(ids), max_model_len, _listed(ids), strings)


def _listed(values: list[Any]) -> bytes:
    """Return a list as JSON, written in pieces: orjson holds the interpreter lock while it writes a piece."""
    pieces = (orjson.dumps(values[at : at + _PIECE])[1:-1] for at in range(0, len(values), _PIECE))
    return b"[%b]" % b",".join(pieces)


def _json(content: bytes, headers: dict[str, str]) -> Response:
    return Response(content, headers=headers, media_type="application/json")
