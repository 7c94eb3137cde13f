"""Clients' texts to token ids.

Tokenising takes 110 to 240 bytes of memory for each byte of text, so little text is tokenised at once, and a text that
is far too long is refused without tokenising all of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from services.common.errors import InvalidRequest
from services.common.portions import portions
from services.common.text.tokenizer import Tokenizer

THREADS = 4
MAX_TEXT_BYTES = 4 * 2**20  # of a text that may be longer than the context, in UTF-8
MAX_TOKENS = MAX_TEXT_BYTES  # that become one text
AT_ONCE_BYTES = 2**20  # of all texts that are tokenised at once, unless one text alone has more
_INLINE_CHARACTERS = 64 * 1024  # of a conversation that waits for no turn
_LONGEST_SPECIAL = 64  # bytes of text that a special token may stand for

R = TypeVar("R")


class TextEncoder:
    """Owned by a service; called on its event loop, works in its own threads.

    ``max_tokens``: texts that cannot fit are refused; None: those of more than ``MAX_TEXT_BYTES`` are.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._longest_token = max(_LONGEST_SPECIAL, *(len(token) for token in tokenizer.vocabulary.token_bytes))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._free = AT_ONCE_BYTES
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()  # the work that waits, with its bytes

    async def encode(
        self, texts: list[str], *, max_tokens: int | None, field: str, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text. Raises ``InvalidRequest``."""
        for text in texts:
            self.check_length(text, max_tokens, field)
        found: list[list[int]] = []
        for some in portions(texts, most_bytes, AT_ONCE_BYTES):  # others have their turn between
            size = sum(map(most_bytes, some))
            found += await self.in_turn(size, self._encode, some, max_tokens, field, add_special_tokens)
        return found

    async def encode_chat(
        self, render: Callable[[], str], *, max_tokens: int | None, field: str, add_special_tokens: bool = False
    ) -> tuple[str, list[int]]:
        """Text and token ids of the conversation that ``render`` makes a text of. Raises ``InvalidRequest``.

        What counts is the rendered text: a template may leave out much of the messages, such as old reasoning.
        """

        def render_and_encode() -> tuple[str, list[int] | None]:
            text = render()
            self.check_length(text, max_tokens, field)
            return text, None if len(text) > _INLINE_CHARACTERS else encode(text)

        def encode(text: str) -> list[int]:
            self._check_beginning(text, max_tokens, field)
            return self.tokenizer.encode(text, add_special_tokens)

        text, ids = await self.in_thread(render_and_encode)
        return text, await self.in_turn(most_bytes(text), encode, text) if ids is None else ids

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool, field: str) -> str:
        """The text of ``tokens``, all in the vocabulary. ``InvalidRequest`` for more than ``encode`` would take."""
        return await self.in_turn(len(tokens), self._decode, tokens, skip_special_tokens, field)

    async def in_thread(self, work: Callable[..., R], *arguments: Any) -> R:
        """``work(*arguments)`` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def in_turn(self, size: int, work: Callable[..., R], *arguments: Any) -> R:
        """Run ``work(*arguments)`` in one of the threads when there is room for ``size`` bytes, or tokens.

        Cancelling does not end the thread's work, which keeps its room until it is done.
        """
        size = min(size, AT_ONCE_BYTES)
        await self._take(size)
        loop = asyncio.get_running_loop()

        def done(_: Future[R]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._give_back, size)

        running = self._threads.submit(work, *arguments)
        running.add_done_callback(done)
        return await asyncio.wrap_future(running)

    def check_length(self, text: str, max_tokens: int | None, field: str) -> None:
        """Refuse, without tokenising, a text with more bytes than ``max_tokens`` of the longest token."""
        if max_tokens is None:
            if most_bytes(text) <= MAX_TEXT_BYTES:
                return
            size = len(text.encode(errors="surrogatepass")) if len(text) <= MAX_TEXT_BYTES else len(text)
            if size > MAX_TEXT_BYTES:
                raise InvalidRequest(
                    f"the text has at least {size} bytes of UTF-8, and where it may be longer than the context at most"
                    f" {MAX_TEXT_BYTES} are taken; send it in parts",
                    field=field,
                    reason="INVALID_VALUE",
                )
        elif len(text) > max_tokens * self._longest_token:
            at_least = -(-len(text) // self._longest_token)
            raise context_exceeded(f"at least {at_least}", max_tokens, field)

    def stop(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(
        self, texts: list[str], max_tokens: int | None, field: str, add_special_tokens: bool
    ) -> list[list[int]]:
        check_unicode(texts, field)
        for text in texts:
            self._check_beginning(text, max_tokens, field)
        return self.tokenizer.encode_batch(texts, add_special_tokens)

    def _decode(self, tokens: Sequence[int], skip_special_tokens: bool, field: str) -> str:
        token_bytes, most = self.tokenizer.vocabulary.with_specials.token_bytes, 4 * MAX_TOKENS
        size = sum(len(token_bytes[token]) for token in tokens if token < len(token_bytes))  # a model may have more
        if size > most:
            raise InvalidRequest(
                f"the text of these tokens has up to {size} bytes, and at most {most} are made; send them in parts",
                field=field,
                reason="INVALID_VALUE",
            )
        return self.tokenizer.decode([*tokens], skip_special_tokens)

    def _check_beginning(self, text: str, max_tokens: int | None, field: str) -> None:
        """Refuse a text of which the beginning alone is far too long: megabytes need not be tokenised for that.

        A cut may split a token and, rarely, change the few before it; hence the margin.
        """
        if max_tokens is None or len(text) <= (length := 8 * max_tokens):
            return
        count = 0
        for at in range(0, len(text), length):
            count += len(self.tokenizer.encode(text[at : at + length]))
            if count > max_tokens + max_tokens // 8 + 64:
                raise context_exceeded(f"more than {max_tokens}", max_tokens, field)

    async def _take(self, size: int) -> None:
        """Wait for room, behind those who came before."""
        if not self._line and size <= self._free:
            self._free -= size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._give_back(0 if turn.cancelled() else size)  # it may have been its turn already
            raise

    def _give_back(self, size: int) -> None:
        self._free += size
        while self._line and (self._line[0][1].cancelled() or self._line[0][0] <= self._free):
            size, turn = self._line.popleft()
            if not turn.cancelled():
                self._free -= size
                turn.set_result(None)


def most_bytes(text: str) -> int:
    """Return an upper bound on the bytes that ``text`` has in UTF-8, exact for ASCII, without encoding it."""
    return len(text) if text.isascii() else 4 * len(text)


def check_unicode(texts: list[str], field: str) -> None:
    """Refuse texts with halves of surrogate pairs, such as Python has where a file's bytes are no UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has half of a surrogate pair at character {error.start}, which no token stands for; decode"
                " it with errors='replace'",
                field=field,
                reason="INVALID_VALUE",
            ) from None


def context_exceeded(prompt_tokens: int | str, max_context_tokens: int, field: str) -> InvalidRequest:
    """Return the error for a prompt that leaves no room for an answer.

    The sentences are OpenAI's: client libraries such as litellm recognise them and shorten the conversation.
    """
    what = "messages" if field == "messages" else "prompt"
    room = ", and the answer needs at least 1" if prompt_tokens == max_context_tokens else ""
    return InvalidRequest(
        f"This model's maximum context length is {max_context_tokens} tokens. However, your {what} resulted in"
        f" {prompt_tokens} tokens{room}. Please reduce the length of the {what}.",
        field=field,
        reason="CONTEXT_LENGTH_EXCEEDED",
    )
