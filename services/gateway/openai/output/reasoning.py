"""Finds the reasoning before an answer in the form of Qwen3: ``<think>...</think>``, then the answer."""

from collections.abc import Generator

from services.common.text.thinking import BEGINS, ENDS
from services.common.text.vocabulary import TokenIds, Vocabulary
from services.gateway.openai.output.deltas import Content, ReasoningDelta
from services.gateway.openai.output.incremental import Incremental


class ReasoningParser(Incremental):
    """Divides one answer into reasoning and content. An answer without markers is all content.

    ``opened``: the prompt ends with ``<think>``. White space around the markers is removed.
    """

    def __init__(self, *, opened: bool) -> None:
        super().__init__()
        self.thought = opened  # the answer has reasoning, or at least its beginning

    def _parse(self) -> Generator[None]:
        while (rest := self._pending.lstrip()) != BEGINS and BEGINS.startswith(rest):
            if self._ended and self._pending:
                self._deltas.append((ReasoningDelta if self.thought else Content)(self._take_all()))
            yield
        if rest.startswith(BEGINS):
            self.thought, rest = True, rest.removeprefix(BEGINS)
        if self.thought:
            self._pending = rest
            yield from self._skip_space()
            yield from self._thoughts()
            yield from self._skip_space()
        while True:
            if self._pending:
                self._deltas.append(Content(self._pending))
                self._pending = ""
            yield

    def _thoughts(self) -> Generator[None]:
        while (where := self._pending.find(ENDS)) < 0:
            if text := self._take_all() if self._ended else self._take_certain((ENDS,)):
                self._deltas.append(ReasoningDelta(text))
            yield
        self._deltas.append(ReasoningDelta(self._pending[:where].rstrip()))
        self._pending = self._pending[where + len(ENDS) :]

    def _skip_space(self) -> Generator[None]:
        while not (rest := self._pending.lstrip()):
            yield
        self._pending = rest


class ReasoningTokens:
    """Counts the tokens up to ``end``, the end of the reasoning, its markers included."""

    def __init__(self, vocabulary: Vocabulary, end: str = ENDS) -> None:
        self._token_bytes, self._end = vocabulary.token_bytes, end.encode()
        self._tail = b""
        self._ended = False
        self.count = 0

    def push(self, token_ids: TokenIds) -> None:
        """Count the next tokens of the answer."""
        if self._ended:
            return
        for token_id in token_ids:
            self.count += 1
            added = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
            self._tail += added
            if self._end in self._tail:
                self._ended = True
                return
            self._tail = self._tail[1 - len(self._end) :]
