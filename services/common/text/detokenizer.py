"""Token ids to text, a few at a time, for one sample."""

import codecs
from collections.abc import Sequence

from services.common.text.vocabulary import Vocabulary


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

    def push(self, token_ids: Sequence[int]) -> str:
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
        self._matched = False
        self.length = 0  # bytes to hold back

    def feed(self, data: bytes) -> None:
        pattern, failure, state = self._pattern, self._failure, self.length
        if self._matched:
            self.length += len(data)  # the match and all behind it stay back until `finish` drops them
            return
        for index, byte in enumerate(data):
            while state and pattern[state] != byte:
                state = failure[state - 1]
            if pattern[state] == byte:
                state += 1
            if state == len(pattern):
                self._matched = True
                self.length = state + len(data) - index - 1
                return
        self.length = state


def _failure_function(pattern: bytes) -> list[int]:
    failure, length = [0] * len(pattern), 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = failure[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        failure[index] = length
    return failure
