"""Finds reasoning and content in an answer of gpt-oss, which is a sequence of messages in channels.

Messages are ``<|channel|>NAME<|message|>TEXT``, with ``<|end|><|start|>assistant`` between them. A message also ends
where the next one starts.
"""

from collections.abc import Generator

from services.gateway.openai.output.deltas import Content, ReasoningDelta
from services.gateway.openai.output.incremental import Incremental, first_of

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|start|>")
FINAL = f"{CHANNEL}final{MESSAGE}"
_REASONING = "analysis"


class ChannelParser(Incremental):
    """Divides one answer into reasoning, which is the channel ``analysis``, and content, which is all others.

    An answer that does not begin with ``<|channel|>`` is all content.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thought = False  # the answer has reasoning, or at least its beginning

    def _parse(self) -> Generator[None]:
        while self._pending != CHANNEL and CHANNEL.startswith(self._pending) and not self._ended:
            yield
        while self._pending.startswith(CHANNEL):
            yield from self._message()
            yield from self._next_message()
        while True:
            self._deltas.append(Content(self._take_all()))
            yield

    def _message(self) -> Generator[None]:
        """Parse a message. The pending text begins with its channel."""
        while (begin := self._pending.find(MESSAGE)) < 0:
            if self._ended:
                self._take_all()
            yield
        name = self._pending[len(CHANNEL) : begin].split(maxsplit=1)
        self._pending = self._pending[begin + len(MESSAGE) :]
        kind = ReasoningDelta if name and name[0] == _REASONING else Content
        self.thought = self.thought or kind is ReasoningDelta
        while (end := first_of(_ENDS, self._pending)) is None:
            if text := self._take_all() if self._ended else self._take_certain(_ENDS):
                self._deltas.append(kind(text))
            yield
        self._deltas.append(kind(self._pending[: end[0]]))
        self._pending = self._pending[end[0] :]

    def _next_message(self) -> Generator[None]:
        """Drop the text up to the channel of the next message."""
        while (begin := self._pending.find(CHANNEL)) < 0:
            if self._ended:
                self._take_all()
            yield
        self._pending = self._pending[begin:]
