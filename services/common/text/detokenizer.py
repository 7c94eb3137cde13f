"""Incremental conversion of a sample's token ids to text."""

import codecs
from collections.abc import Sequence

from services.common.text.vocabulary import TokenIds, Vocabulary


class Detokenizer:
    """Detokenizer of one sample. Used by one thread.

    It returns whole characters only, and holds back text that may be the start of a stop string. A SentencePiece token
    that begins a word keeps its space at the start of the answer. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, vocabulary: Vocabulary, stop_strings: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._matches = [_PrefixMatch(stop.encode()) for stop in stop_strings]
        self._withheld = b""  # bytes not yet returned
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: TokenIds) -> str:
        """Append tokens. Return the text that is certain now."""
        fresh = self._vocabulary.text_bytes(token_ids)
        if not self._matches:
            return self._decoder.decode(fresh)
        for match in self._matches:
            match.feed(fresh)
        pending = self._withheld + fresh
        keep = max(match.length for match in self._matches)
        certain, self._withheld = pending[: len(pending) - keep], pending[len(pending) - keep :]
        return self._decoder.decode(certain)

    def finish(self, trailing_bytes: int = 0) -> str:
        """Return the rest of the text without its last ``trailing_bytes`` bytes. Call it once.

        The trailing bytes are a matched stop string and the text after it.
        """
        rest = self._withheld[: len(self._withheld) - trailing_bytes] if trailing_bytes else self._withheld
        self._withheld = b""
        return self._decoder.decode(rest, final=True)


class _PrefixMatch:
    """Length of the prefix of ``pattern`` with which the bytes end (Knuth, Morris and Pratt 1977)."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern
        self._failure = _failure_function(pattern)
        self._state = 0
        self.length = 0  # bytes to withhold

    def feed(self, data: bytes) -> None:
        """Append ``data``.

        A complete match is withheld with the bytes after it, until more bytes are appended: then it did not end the
        sample, because it occurred before min_tokens.
        """
        pattern, failure, state, since_match = self._pattern, self._failure, self._state, 0
        for index, byte in enumerate(data):
            while state and pattern[state] != byte:
                state = failure[state - 1]
            if pattern[state] == byte:
                state += 1
            if state == len(pattern):
                since_match = since_match or len(pattern) + len(data) - index - 1
                state = failure[state - 1]
        self._state, self.length = state, max(state, since_match)


def _failure_function(pattern: bytes) -> list[int]:
    failure, length = [0] * len(pattern), 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = failure[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        failure[index] = length
    return failure
