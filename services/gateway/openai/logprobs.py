"""Log-probabilities in OpenAI's two shapes, for chat completions and for completions."""

from collections.abc import Callable, Sequence
from typing import Any

from services.gateway.engine.active_request import ActiveSample
from services.gateway.openai.transcript import TokenEntry

TokenText = Callable[[int], tuple[str, bytes]]

# OpenAI's stand-in for minus infinity, which JSON does not have.
LOWEST = -9999.0


def mean_logprob(choice: ActiveSample) -> float:
    """Return the mean log-probability of the tokens of a choice that has ended and was not taken yet."""
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.new_logprobs))


def chat_content(entries: Sequence[TokenEntry], token_text: TokenText) -> list[dict[str, Any]]:
    """Return ``logprobs.content`` of a chat choice."""
    return [
        _chat_token(entry.token_id, entry.logprob.logprob, token_text)
        | {
            "top_logprobs": [
                _chat_token(token, value, token_text)
                for token, value in zip(entry.logprob.top_ids, entry.logprob.top_logprobs, strict=True)
            ]
        }
        for entry in entries
        if entry.logprob is not None  # only a prompt's first token has none
    ]


def completion_logprobs(entries: Sequence[TokenEntry], token_text: TokenText) -> dict[str, Any]:
    """Return ``logprobs`` of a completion choice. The chosen token is always among the top ones."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, logprob, _ in entries:
        token = _completion_token(token_id, token_text)
        value = top = None
        if logprob is not None:
            value = max(logprob.logprob, LOWEST)
            top = {
                _completion_token(other, token_text): max(other_value, LOWEST)
                for other, other_value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)
            }
            top.setdefault(token, value)
        tokens.append(token)
        values.append(value)
        tops.append(top)
    offsets = [entry.text_offset for entry in entries]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _chat_token(token_id: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text, data = token_text(token_id)
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}


def _completion_token(token_id: int, token_text: TokenText) -> str:
    """Return the text of a token. If it is not whole characters, return its bytes, which are unique."""
    text, data = token_text(token_id)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if "\ufffd" in text else text
