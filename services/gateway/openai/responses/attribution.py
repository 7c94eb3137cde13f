"""Assigns the log-probabilities of tokens to the content of an answer that also has reasoning and tool calls."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from services.gateway.openai.output.deltas import Content, Delta
from services.gateway.openai.output.reader import OutputReader
from services.gateway.openai.transcript import TokenEntry


class _Token(NamedTuple):
    """A token that belongs to no delta yet."""

    text: str
    logprob: dict[str, Any] | None  # as JSON. None if the text continues that of an earlier token


class Attribution:
    """Returns the deltas of one answer with the log-probabilities of their tokens.

    The reader gets the text token by token, so the result does not depend on the pieces in which the text arrives.
    Tokens of markers, reasoning and calls are left out.
    """

    def __init__(self, reader: OutputReader) -> None:
        self._reader = reader
        self._waiting: list[_Token] = []
        self._begin = 0  # characters of the answer before the next piece

    def read(
        self, text: str, entries: Sequence[TokenEntry], logprobs: Sequence[dict[str, Any]], *, last: bool
    ) -> Iterator[tuple[list[Delta], list[dict[str, Any]]]]:
        """Yield the deltas of the next ``text``, each with its log-probabilities.

        ``entries``: the tokens of ``text``. ``logprobs``: their log-probabilities as JSON.
        """
        starts = [max(0, entry.text_offset - self._begin) for entry in entries]
        ends = [*starts[1:], len(text)] if starts else []
        yield from self._push(_Token(text[: starts[0]] if starts else text, None))
        for start, end, logprob in zip(starts, ends, logprobs, strict=True):
            yield from self._push(_Token(text[start:end], logprob))
        self._begin += len(text)
        if last:
            yield from self._with_logprobs(self._reader.finish())

    def _push(self, token: _Token) -> Iterator[tuple[list[Delta], list[dict[str, Any]]]]:
        self._waiting.append(token)
        if token.text:
            yield from self._with_logprobs(self._reader.push(token.text))

    def _with_logprobs(self, deltas: list[Delta]) -> Iterator[tuple[list[Delta], list[dict[str, Any]]]]:
        for delta in deltas:
            if isinstance(delta, Content):
                yield [delta], self._take(delta.text)
            else:
                del self._waiting[:-1]  # a part of the last token may be content
                yield [delta], []

    def _take(self, content: str) -> list[dict[str, Any]]:
        """Return the log-probabilities of ``content``. Drop the tokens before it, and keep those after it."""
        text = "".join(token.text for token in self._waiting)
        begin = 0 if text.startswith(content) else max(0, text.rfind(content))
        end, at, taken, rest = begin + len(content), 0, [], []
        for token in self._waiting:
            if at >= end:
                rest.append(token)
            elif token.logprob and (at + len(token.text) > begin or (not token.text and at >= begin)):
                taken.append(token.logprob)
            at += len(token.text)
        self._waiting = rest
        return taken
