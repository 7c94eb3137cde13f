"""One answer's text to its parts, whole or as it comes: any cut of the text gives the same parts."""

from collections.abc import Iterable

from services.common.text.vocabulary import TokenIds
from services.gateway.openai.output.calls import CallParser
from services.gateway.openai.output.deltas import Arguments, CallBegun, Content, Delta, merged
from services.gateway.openai.output.reasoning import ReasoningParser, ReasoningTokens


class OutputReader:
    """Owned by one choice. Without ``parallel`` all calls but the first are left out. ``named``: a call is the whole
    answer, as was asked for."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: CallParser | None = None,
        *,
        parallel: bool = True,
        named: bool = False,
        tokens: ReasoningTokens | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self.named = named
        self._tokens = tokens
        self.call_count = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far."""
        return self._tokens.count if self._tokens and self._reasoning and self._reasoning.thought else 0

    @property
    def in_call(self) -> bool:
        """Whether the arguments of the last call that was told are not at their end."""
        return self._calls is not None and self._calls.in_arguments and (self._parallel or self.call_count < 2)

    def count(self, token_ids: TokenIds) -> None:
        """The next tokens, whose words may come later."""
        if self._tokens is not None:
            self._tokens.push(token_ids)

    def push(self, text: str) -> list[Delta]:
        """Take the next words; tell what is certain."""
        if self._reasoning is None:
            return self._wanted(self._in_calls([Content(text)]))
        return self._wanted(self._in_calls(self._reasoning.push(text)))

    def finish(self) -> list[Delta]:
        """The answer is over: what is left of it."""
        deltas = self._in_calls(self._reasoning.finish() if self._reasoning is not None else [])
        return self._wanted([*deltas, *(self._calls.finish() if self._calls is not None else [])])

    def _in_calls(self, deltas: Iterable[Delta]) -> list[Delta]:
        if self._calls is None:
            return list(deltas)
        found: list[Delta] = []
        for delta in deltas:
            found += self._calls.push(delta.text) if isinstance(delta, Content) else [delta]
        return found

    def _wanted(self, deltas: Iterable[Delta]) -> list[Delta]:
        wanted = []
        for delta in merged(deltas):
            self.call_count += isinstance(delta, CallBegun)
            if self._parallel or self.call_count < 2 or not isinstance(delta, CallBegun | Arguments):
                wanted.append(delta)
        return wanted
