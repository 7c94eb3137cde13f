"""Log-probabilities of a prompt: before the answer with ``echo``, and in vLLM's shape."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.codec import PromptScores, TokenLogprob
from services.gateway.openai.logprobs import LOWEST, TokenText
from services.gateway.openai.transcript import Piece, TokenEntry


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
