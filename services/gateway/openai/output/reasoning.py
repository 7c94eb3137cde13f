"""Finds the reasoning before an answer in the form of Qwen3: ``<think>...</think>``, then the answer."""

from collections.abc import Callable

from services.common.text.thinking import BEGINS, ENDS
from services.common.text.vocabulary import TokenIds, Vocabulary
from services.gateway.openai.output.deltas import Content, Delta, ReasoningDelta
from services.gateway.openai.output.incremental import Incremental
from services.gateway.openai.output.markers import certain_length


class ReasoningParser(Incremental):
    """Divides one answer into reasoning and content. An answer without markers is all content.

    ``opened``: the prompt ends with ``<think>``. White space around the markers is removed.
    """

    def __init__(self, *, opened: bool) -> None:
        super().__init__(self._beginning)
        self.thought = opened  # the answer has reasoning, or at least its beginning

    def finish(self) -> list[Delta]:
        """Return the deltas of the rest of the answer."""
        if self._read == self._after_thoughts:
            return []
        return [
            ReasoningDelta(self._pending) if self.thought and self._read != self._content else Content(self._pending)
        ]

    # The states. Each returns the deltas that it finds in the pending text, or None if it needs more text.

    def _beginning(self) -> list[Delta] | None:
        rest = self._pending.lstrip()
        if rest.startswith(BEGINS):
            self.thought, rest = True, rest[len(BEGINS) :]
        elif BEGINS.startswith(rest):
            return None
        elif not self.thought:
            self._read = self._content
            return []
        self._pending, self._read = rest, self._before_thoughts
        return []

    def _before_thoughts(self) -> list[Delta] | None:
        return self._skip_space(self._thoughts)

    def _thoughts(self) -> list[Delta] | None:
        thoughts, end, rest = self._pending.partition(ENDS)
        if end:
            self._pending, self._read = rest, self._after_thoughts
            return [ReasoningDelta(thoughts.rstrip())]
        length = certain_length((ENDS,), thoughts)
        thoughts, self._pending = thoughts[:length], thoughts[length:]
        return [ReasoningDelta(thoughts)] if thoughts else None

    def _after_thoughts(self) -> list[Delta] | None:
        return self._skip_space(self._content)

    def _skip_space(self, following: Callable[[], list[Delta] | None]) -> list[Delta] | None:
        self._pending = self._pending.lstrip()
        if not self._pending:
            return None
        self._read = following
        return []

    def _content(self) -> list[Delta] | None:
        text, self._pending = self._pending, ""
        return [Content(text)] if text else None


class ReasoningTokens:
    """Counts the tokens up to the end of the reasoning, its markers included."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._tail = b""
        self._ended = False
        self.count = 0

    def push(self, token_ids: TokenIds) -> None:
        """Count the next tokens of the answer."""
        if self._ended:
            return
        end = ENDS.encode()
        for token_id in token_ids:
            self.count += 1
            added = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
            self._tail += added
            if end in self._tail:
                self._ended = True
                return
            self._tail = self._tail[1 - len(end) :]
