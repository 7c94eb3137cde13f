"""Divides the text of an answer into its parts. The parts do not depend on the pieces in which the text arrives."""

from collections.abc import Iterable

from services.common.text.vocabulary import TokenIds
from services.gateway.openai.output.calls import CallParser
from services.gateway.openai.output.channels import ChannelParser
from services.gateway.openai.output.deltas import Arguments, CallBegun, Content, Delta, merged
from services.gateway.openai.output.reasoning import ReasoningParser, ReasoningTokens


class OutputReader:
    """The reader of one choice.

    Without ``parallel``, all calls after the first are left out. ``named``: the caller demands a call of one tool.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | ChannelParser | None = None,
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
        """Number of tokens in the reasoning so far."""
        return self._tokens.count if self._tokens and self._reasoning and self._reasoning.thought else 0

    @property
    def in_call(self) -> bool:
        """True if the text ends within the arguments of the last call that was returned."""
        return self._calls is not None and self._calls.in_arguments and (self._parallel or self.call_count < 2)

    def count(self, token_ids: TokenIds) -> None:
        """Count the next tokens. Their text may be pushed later."""
        if self._tokens is not None:
            self._tokens.push(token_ids)

    def push(self, text: str) -> list[Delta]:
        """Add text, and return the deltas whose meaning is known."""
        deltas = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return self._wanted(self._in_calls(deltas))

    def finish(self) -> list[Delta]:
        """Return the deltas of the rest of the answer."""
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
