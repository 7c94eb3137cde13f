"""One choice's tokens as text, and its logprobs held back as long as their text is."""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from services.common.text.detokenizer import Detokenizer
from services.common.text.vocabulary import TokenIds, Vocabulary
from services.gateway.engine.codec import Ending, TokenLogprob
from services.gateway.openai.packed_logprobs import Packed


class TokenEntry(NamedTuple):
    """A token with its logprob; ``text_offset`` counts characters of the choice's text before it."""

    token_id: int
    logprob: TokenLogprob | None  # None: the first token of a prompt has none
    text_offset: int


class Piece(NamedTuple):
    """What is new in a choice's answer."""

    text: str
    entries: list[TokenEntry]
    token_ids: list[int] | None = None  # all new ones, also those whose text is held back; None: not asked for
    prompt_logprobs: list[Any] | None = None  # in vLLM's shape; None: not asked for
    packed: Packed | None = None  # log-probabilities of all tokens; None: not asked for
    stop_reason: str | int | None = None  # with the last piece: the stop string or token id that ended the choice


def whole_text(vocabulary: Vocabulary, token_ids: TokenIds, ending: Ending) -> str:
    """The text of a choice that is complete: what a ``Transcript`` says in all, in one go."""
    if isinstance(token_ids, np.ndarray) and token_ids.max(initial=0) < vocabulary.size:
        data = b"".join(map(vocabulary.token_bytes.__getitem__, token_ids.tolist()))  # twice as fast
    else:
        data = vocabulary.text_bytes(token_ids)
    return data[: len(data) - ending.trailing_bytes].decode(errors="replace")


class Transcript:
    """Owned by one choice; used by one thread. The text of all pieces is the answer, whatever the pieces."""

    def __init__(self, vocabulary: Vocabulary, stop_strings: Sequence[str] = (), *, behind: int = 0) -> None:
        """``behind``: characters of the choice's text that stand before its tokens."""
        self._token_bytes = vocabulary.token_bytes
        self._detokenizer = Detokenizer(vocabulary, stop_strings)
        self._held: deque[tuple[int, TokenEntry]] = deque()  # (where its bytes begin, entry)
        self._bytes = 0  # of all tokens so far
        self._characters = behind  # complete in them, and before
        self._counter = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._told = 0  # bytes of the text given out

    def push(self, token_ids: TokenIds, logprobs: Sequence[TokenLogprob | None]) -> Piece:
        """Take new tokens; give the text that is certain, and the logprobs of the tokens it came from."""
        text = self._detokenizer.push(token_ids)
        if not logprobs:
            return Piece(text, [])
        self._hold(token_ids, logprobs)
        self._told += len(text.encode())
        return Piece(text, self._release(self._told))

    def finish(self, ending: Ending) -> Piece:
        """The rest of the answer, without the stop string and the tokens that belong to nothing else."""
        text = self._detokenizer.finish(ending.trailing_bytes)
        return Piece(text, self._release(self._bytes - ending.trailing_bytes if ending.trailing_bytes else None))

    def _hold(self, token_ids: TokenIds, logprobs: Sequence[TokenLogprob | None]) -> None:
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            added = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
            if logprob is not None:
                # Half a character that this token does not complete will stand in the text as U+FFFD.
                broken = bool(self._counter.getstate()[0]) and added[:1] != b"" and added[0] & 0xC0 != 0x80
                self._held.append((self._bytes, TokenEntry(token_id, logprob, self._characters + broken)))
            self._bytes += len(added)
            self._characters += len(self._counter.decode(added))

    def _release(self, end: int | None) -> list[TokenEntry]:
        """The held entries whose bytes begin before ``end`` (None: all)."""
        released = []
        while self._held and (end is None or self._held[0][0] < end):
            released.append(self._held.popleft()[1])
        return released
