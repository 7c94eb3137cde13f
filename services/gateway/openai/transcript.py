"""The text of one choice's tokens, and their log-probabilities, which are held back until their text is final."""

import codecs
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from services.common.text.detokenizer import Detokenizer
from services.common.text.vocabulary import TokenIds, Vocabulary
from services.gateway.engine.codec import SampleEnding, TokenLogprob
from services.gateway.openai.packed_logprobs import Packed


class TokenEntry(NamedTuple):
    """A token with its log-probability."""

    token_id: int
    logprob: TokenLogprob | None  # None for the first token of a prompt
    text_offset: int  # characters of the choice's text before the token


class Piece(NamedTuple):
    """The next part of a choice. A field is None if the caller does not want it."""

    text: str
    entries: list[TokenEntry]
    token_ids: list[int] | None = None  # all new tokens, also those whose text is held back
    prompt_logprobs: list[Any] | None = None  # in vLLM's shape
    packed: Packed | None = None  # log-probabilities of all tokens
    weights: tuple[tuple[str, int], ...] = ()  # in the last piece: ``SampleEnding.weights``
    stop_reason: str | int | None = None  # in the last piece: the stop string or token id that ended the choice
    routed_experts: str | None = None  # in the last piece
    ending: SampleEnding | None = None  # in the last piece of a stream


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return the consecutive ``pieces`` of a stream's choice as one piece."""
    texts, entries, token_ids, *_ = zip(*pieces, strict=True)
    ids = None if token_ids[0] is None else list(chain.from_iterable(token_ids))
    experts = pieces[-1].routed_experts
    return Piece("".join(texts), list(chain.from_iterable(entries)), ids, routed_experts=experts)


def whole_text(vocabulary: Vocabulary, token_ids: TokenIds, ending: SampleEnding) -> str:
    """Return the text of a complete choice. It is the text that a ``Transcript`` returns in pieces."""
    if isinstance(token_ids, np.ndarray) and token_ids.max(initial=0) < vocabulary.size:
        data = b"".join(map(vocabulary.token_bytes.__getitem__, token_ids.tolist()))  # twice as fast
    else:
        data = vocabulary.text_bytes(token_ids)
    return data[: len(data) - ending.trailing_bytes].decode(errors="replace")


class Transcript:
    """Turns the tokens of one choice into pieces of text. Used by one thread.

    The text of all pieces together does not depend on how the tokens are divided.
    """

    def __init__(self, vocabulary: Vocabulary, stop_strings: Sequence[str] = (), *, offset: int = 0) -> None:
        """Create a transcript. ``offset``: number of characters of the choice's text before its tokens."""
        self._token_bytes = vocabulary.token_bytes
        self._detokenizer = Detokenizer(vocabulary, stop_strings)
        self._waiting: deque[tuple[int, TokenEntry]] = deque()  # offset of its bytes, entry
        self._bytes = 0  # of all tokens so far
        self._characters = offset  # complete characters of all tokens, and those before them
        self._counter = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._released = 0  # bytes of the text that was returned

    def push(self, token_ids: TokenIds, logprobs: Sequence[TokenLogprob | None]) -> Piece:
        """Add tokens. Return the text that is final, and the log-probabilities of its tokens."""
        text = self._detokenizer.push(token_ids)
        if not logprobs:
            return Piece(text, [])
        self._append(token_ids, logprobs)
        self._released += len(text.encode())
        return Piece(text, self._release(self._released))

    def finish(self, ending: SampleEnding) -> Piece:
        """Return the rest of the text, without the stop string and the tokens that are only part of it."""
        text = self._detokenizer.finish(ending.trailing_bytes)
        return Piece(text, self._release(self._bytes - ending.trailing_bytes if ending.trailing_bytes else None))

    def _append(self, token_ids: TokenIds, logprobs: Sequence[TokenLogprob | None]) -> None:
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            added = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
            if logprob is not None:
                # An incomplete character that this token does not complete becomes U+FFFD, before this token.
                broken = bool(self._counter.getstate()[0]) and added[:1] != b"" and added[0] & 0xC0 != 0x80
                self._waiting.append((self._bytes, TokenEntry(token_id, logprob, self._characters + broken)))
            self._bytes += len(added)
            self._characters += len(self._counter.decode(added))

    def _release(self, end: int | None) -> list[TokenEntry]:
        """Remove the waiting entries whose bytes begin before ``end``, or all if it is None, and return them."""
        released = []
        while self._waiting and (end is None or self._waiting[0][0] < end):
            released.append(self._waiting.popleft()[1])
        return released
