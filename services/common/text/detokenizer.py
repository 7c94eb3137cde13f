"""Token ids to text, a few at a time, for one sample."""

import codecs
from collections.abc import Sequence

from services.common.text.vocabulary import TokenIds, Vocabulary


class Detokenizer:
    """Gives out whole characters only, and nothing that may turn out to be the start of a stop string.

    The text reads as it stands behind the prompt: a SentencePiece token that begins a word keeps its space. Bytes that
    are not UTF-8 become U+FFFD. Owned by one sample, used by one thread.
    """

    def __init__(self, vocabulary: Vocabulary, stop_strings: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._holds = [_PrefixMatch(stop.encode()) for stop in stop_strings]
        self._held = b""  # bytes not yet given out
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: TokenIds) -> str:
        """Take the next tokens; return the text that is certain by now."""
        fresh = self._vocabulary.text_bytes(token_ids)
        if not self._holds:
            return self._decoder.decode(fresh)
        for hold in self._holds:
            hold.feed(fresh)
        pending = self._held + fresh
        keep = max(hold.length for hold in self._holds)
        certain, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        return self._decoder.decode(certain)

    def finish(self, trailing_bytes: int = 0) -> str:
        """The rest of the text, without the last ``trailing_bytes`` bytes of it (a matched stop string and what came
        after it). Call once."""
        rest = self._held[: len(self._held) - trailing_bytes] if trailing_bytes else self._held
        self._held = b""
        return self._decoder.decode(rest, final=True)


class _PrefixMatch:
    """How much of ``pattern`` the bytes so far end with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern
        self._failure = _failure_function(pattern)
        self._state = 0
        self.length = 0  # bytes to hold back

    def feed(self, data: bytes) -> None:
        """A whole match is held back with all behind it, until more is fed: then it did not end the sample (it came
        before min_tokens)."""
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
