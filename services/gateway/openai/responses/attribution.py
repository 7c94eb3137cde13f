"""Which tokens' log-probabilities belong to the words for the user, where an answer has thoughts and calls besides."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from services.gateway.openai.output.deltas import Content, Delta
from services.gateway.openai.output.reader import OutputReader
from services.gateway.openai.transcript import TokenEntry


class _Token(NamedTuple):
    """One that nobody was told of yet."""

    text: str
    told: dict[str, Any] | None  # as JSON; None: the text goes on with that of an earlier one


class Attribution:
    """Of one answer. Its reader gets the text token by token, so that any cut of it gives the same tokens: those that
    content came from. Tokens of marks, thoughts and calls are left out."""

    def __init__(self, reader: OutputReader) -> None:
        self._reader = reader
        self._waiting: list[_Token] = []
        self._begin = 0  # characters of the answer before the next piece

    def read(
        self, text: str, entries: Sequence[TokenEntry], told: Sequence[dict[str, Any]], *, last: bool
    ) -> Iterator[tuple[list[Delta], list[dict[str, Any]]]]:
        """What is new, in order, each with its tokens. ``told``: beside ``entries``, as JSON."""
        starts = [max(0, entry.text_offset - self._begin) for entry in entries]
        ends = [*starts[1:], len(text)] if starts else []
        yield from self._push(_Token(text[: starts[0]] if starts else text, None))
        for start, end, token in zip(starts, ends, told, strict=True):
            yield from self._push(_Token(text[start:end], token))
        self._begin += len(text)
        if last:
            yield from self._tell(self._reader.finish())

    def _push(self, token: _Token) -> Iterator[tuple[list[Delta], list[dict[str, Any]]]]:
        self._waiting.append(token)
        if token.text:
            yield from self._tell(self._reader.push(token.text))

    def _tell(self, deltas: list[Delta]) -> Iterator[tuple[list[Delta], list[dict[str, Any]]]]:
        for delta in deltas:
            if isinstance(delta, Content):
                yield [delta], self._taken(delta.text)
            else:
                del self._waiting[:-1]  # of the last one a part may be content
                yield [delta], []

    def _taken(self, content: str) -> list[dict[str, Any]]:
        """The tokens of ``content``. What waits before them was of something else; what is behind waits on."""
        text = "".join(token.text for token in self._waiting)
        begin = 0 if text.startswith(content) else max(0, text.rfind(content))
        end, at, taken, rest = begin + len(content), 0, [], []
        for token in self._waiting:
            if at >= end:
                rest.append(token)
            elif token.told and (at + len(token.text) > begin or (not token.text and at >= begin)):
                taken.append(token.told)
            at += len(token.text)
        self._waiting = rest
        return taken
