"""Log-probabilities of answers in OpenAI's two shapes, and of prompts in OpenAI's or vLLM's."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.codec import PromptScores, TokenLogprob
from services.gateway.engine.text import TextEngine
from services.gateway.openai.schemas import GenerationBody
from services.gateway.openai.transcript import Piece, TokenEntry

TokenText = Callable[[int], tuple[str, bytes]]

# OpenAI's stand-in for minus infinity, which JSON does not have.
LOWEST = -9999.0


def names_of_tokens(text: TextEngine, body: GenerationBody) -> TokenText:
    """Return the function that returns the text and the bytes of a token, or ``token_id:ID`` as its text."""
    token_text = text.token_text
    if not body.return_tokens_as_token_ids:
        return token_text
    return lambda token_id: (f"token_id:{token_id}", token_text(token_id)[1])


def rank(choice: ActiveSample) -> tuple[bool, float]:
    """Return a value that is larger for a better choice. The choice has ended and was not taken yet.

    Whole choices are better than aborted ones. Then the mean log-probability of the tokens decides.
    """
    mean = sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.new_logprobs))
    return choice.outcome.reason != "abort", mean


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


def echoed(
    prompt: np.ndarray, scores: Sequence[PromptScores], top: int, text: str, vocabulary: Vocabulary, piece: Piece
) -> Piece:
    """Return ``piece`` after its prompt, whose text is ``text``, with the log-probabilities of both."""
    tokens = prompt.tolist()
    offsets, characters = _offsets(tokens, vocabulary)
    missing = characters - len(text)  # the given text may lack a space with which the tokens begin
    logprobs = [None, *(TokenLogprob(logprob, ids, values) for _, logprob, ids, values in _rows(scores, top))]
    rows = zip(tokens, logprobs, offsets, strict=True)
    entries = [TokenEntry(token, logprob, max(0, offset - missing)) for token, logprob, offset in rows]
    return piece._replace(text=text + piece.text, entries=entries + piece.entries)


def prompt_logprobs(
    prompt: np.ndarray, scores: Sequence[PromptScores], top: int, token_text: TokenText, start: int = 0
) -> list[dict[str, Any] | None]:
    """Return an entry for each token of ``prompt`` from position ``start``.

    The entry has the log-probabilities of the token and of the ``top`` most likely tokens, by token id. The entry of
    the token at position 0 is None.
    """
    entries: list[dict[str, Any] | None] = [] if start else [None]
    scored = prompt[max(1, start) :].tolist()
    for token, (rank, logprob, ids, values) in zip(scored, _rows(scores, top), strict=True):
        entry = {str(token): _entry(token, rank, logprob, token_text)}
        for number, (other, value) in enumerate(zip(ids, values, strict=True), 1):
            entry.setdefault(str(other), _entry(other, number, value, token_text))
        entries.append(entry)
    return entries


def _entry(token: int, rank: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": token_text(token)[0]}


def _rows(scores: Sequence[PromptScores], top: int) -> Iterator[tuple[int, float, list[int], list[float]]]:
    """Yield for each token its rank, its log-probability, and the ids and log-probabilities of the ``top`` tokens."""
    for part in scores:
        columns = part.ranks, part.logprobs, part.top_ids[:, :top], part.top_logprobs[:, :top]
        yield from zip(*(column.tolist() for column in columns), strict=True)


def _offsets(token_ids: Sequence[int], vocabulary: Vocabulary) -> tuple[list[int], int]:
    """Return the number of characters before each token, and the number of all characters."""
    counter, starts, characters = codecs.getincrementaldecoder("utf-8")(errors="replace"), [], 0
    for token in token_ids:
        added = vocabulary.token_bytes[token] if token < vocabulary.size else b""
        # An incomplete character that this token does not complete becomes U+FFFD, before this token.
        broken = bool(counter.getstate()[0]) and added[:1] != b"" and added[0] & 0xC0 != 0x80
        starts.append(characters + broken)
        characters += len(counter.decode(added))
    return starts, characters + len(counter.decode(b"", final=True))
