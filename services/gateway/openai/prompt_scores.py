"""Log-probabilities of a prompt: as an echo has them, and in vLLM's shape."""

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
    """``piece`` behind its prompt, which has the text ``text``."""
    tokens = prompt.tolist()
    offsets, characters = _offsets(tokens, vocabulary)
    missing = characters - len(text)  # the text that was given may lack a space that the tokens begin with
    told = [None, *(TokenLogprob(logprob, ids, values) for _, logprob, ids, values in _rows(scores, top))]
    rows = zip(tokens, told, offsets, strict=True)
    entries = [TokenEntry(token, logprob, max(0, offset - missing)) for token, logprob, offset in rows]
    return piece._replace(text=text + piece.text, entries=entries + piece.entries)


def prompt_logprobs(
    prompt: np.ndarray, scores: Sequence[PromptScores], top: int, token_text: TokenText, start: int = 0
) -> list[dict[str, Any] | None]:
    """Return an entry for each token of ``prompt`` from position ``start``: itself and the ``top`` most likely ones.

    Entries are by token id. The token at position 0 has none.
    """
    told: list[dict[str, Any] | None] = [] if start else [None]
    scored = prompt[max(1, start) :].tolist()
    for token, (rank, logprob, ids, values) in zip(scored, _rows(scores, top), strict=True):
        entry = {str(token): _entry(token, rank, logprob, token_text)}
        for place, (other, value) in enumerate(zip(ids, values, strict=True), 1):
            entry.setdefault(str(other), _entry(other, place, value, token_text))
        told.append(entry)
    return told


def _entry(token: int, rank: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": token_text(token)[0]}


def _rows(scores: Sequence[PromptScores], top: int) -> Iterator[tuple[int, float, list[int], list[float]]]:
    """Rank, log-probability, and the ``top`` most likely tokens with theirs, token by token."""
    for part in scores:
        columns = part.ranks, part.logprobs, part.top_ids[:, :top], part.top_logprobs[:, :top]
        yield from zip(*(column.tolist() for column in columns), strict=True)


def _offsets(token_ids: Sequence[int], vocabulary: Vocabulary) -> tuple[list[int], int]:
    """Characters of the text before each token, and in all."""
    counter, starts, characters = codecs.getincrementaldecoder("utf-8")(errors="replace"), [], 0
    for token in token_ids:
        added = vocabulary.token_bytes[token] if token < vocabulary.size else b""
        # Half a character that this token does not complete stands in the text as U+FFFD.
        broken = bool(counter.getstate()[0]) and added[:1] != b"" and added[0] & 0xC0 != 0x80
        starts.append(characters + broken)
        characters += len(counter.decode(added))
    return starts, characters + len(counter.decode(b"", final=True))
