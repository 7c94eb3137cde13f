"""Encodes clients' texts as token ids in bounded memory.

Tokenising takes 110 to 400 bytes of memory for each byte of text, so the text that is tokenised at once is bounded. A
text that is far too long is refused before all of it is tokenised.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Any, TypeVar

from services.common.chunks import chunks_by_size
from services.common.errors import InvalidRequest
from services.common.text.tokenizer import Tokenizer

THREADS = 4
MAX_TEXT_BYTES = 4 * 2**20  # UTF-8 bytes of a text that may be longer than the context
MAX_TOKENS = MAX_TEXT_BYTES  # tokens to decode to one text
AT_ONCE_BYTES = 2**20  # sum of the texts that are tokenised at once; a longer text is tokenised alone
_INLINE_CHARACTERS = 64 * 1024  # a conversation up to this length is tokenised without a reservation
_ENCODED_CHARACTERS = 2**20  # a text up to this length is encoded to find its UTF-8 length, in a millisecond
_LONGEST_SPECIAL = 64  # bytes of text that a special token may represent

R = TypeVar("R")


class TextEncoder:
    """Tokenizer of a service with a pool of threads. Call its methods on the service's event loop.

    Methods refuse texts longer than ``max_tokens``. If it is None, they refuse texts of more than ``MAX_TEXT_BYTES``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._longest_token = max(_LONGEST_SPECIAL, *(len(token) for token in tokenizer.vocabulary.token_bytes))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._free = AT_ONCE_BYTES
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()  # sizes and futures of waiting reservations

    async def encode(
        self, texts: list[str], *, max_tokens: int | None, field: str, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text. Raises ``InvalidRequest``."""
        for text in texts:
            self.check_length(text, max_tokens, field)
        found: list[list[int]] = []
        sized = [(text, max_utf8_bytes(text)) for text in texts]
        for chunk in chunks_by_size(sized, itemgetter(1), AT_ONCE_BYTES):  # work of other requests runs between chunks
            together, sizes = zip(*chunk, strict=True)
            found += await self.with_reservation(
                sum(sizes), self._encode, list(together), max_tokens, field, add_special_tokens
            )
        return found

    async def encode_chat(
        self, render: Callable[[], str], *, max_tokens: int | None, field: str, add_special_tokens: bool = False
    ) -> tuple[str, list[int]]:
        """Return the text that ``render`` returns, and its token ids. Raises ``InvalidRequest``.

        The limits apply to the rendered text, since a template may leave out much of the messages (old reasoning).
        """

        def render_and_encode() -> tuple[str, list[int] | None]:
            text = render()
            self.check_length(text, max_tokens, field)
            return text, None if len(text) > _INLINE_CHARACTERS else encode(text)

        def encode(text: str) -> list[int]:
            self._check_beginning(text, max_tokens, field)
            return self.tokenizer.encode(text, add_special_tokens)

        text, ids = await self.in_thread(render_and_encode)
        return text, await self.with_reservation(max_utf8_bytes(text), encode, text) if ids is None else ids

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool, field: str) -> str:
        """Return the text of ``tokens``, all in the vocabulary. Raises ``InvalidRequest`` if the text is too long."""
        return await self.with_reservation(len(tokens), self._decode, tokens, skip_special_tokens, field)

    async def in_thread(self, work: Callable[..., R], *arguments: Any) -> R:
        """Run ``work(*arguments)`` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def with_reservation(self, size: int, work: Callable[..., R], *arguments: Any) -> R:
        """Reserve ``size`` bytes (or tokens to decode), then run ``work(*arguments)`` in one of the threads.

        If the caller is cancelled, the work still runs to its end, and its reservation lasts until then.
        """
        size = min(size, AT_ONCE_BYTES)
        await self._reserve(size)
        loop = asyncio.get_running_loop()

        def done(_: Future[R]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._release, size)

        running = self._threads.submit(work, *arguments)
        running.add_done_callback(done)
        return await asyncio.wrap_future(running)

    def check_length(self, text: str, max_tokens: int | None, field: str) -> None:
        """Refuse a text that cannot fit, without tokenising it: one longer than ``max_tokens`` of the longest token."""
        if max_tokens is None:
            if max_utf8_bytes(text) <= MAX_TEXT_BYTES:
                return
            size = len(text.encode(errors="surrogatepass")) if len(text) <= MAX_TEXT_BYTES else len(text)
            if size > MAX_TEXT_BYTES:
                raise InvalidRequest(
                    f"the text has at least {size} bytes of UTF-8: a text that may be longer than the context has at"
                    f" most {MAX_TEXT_BYTES} bytes; send it in parts",
                    field=field,
                    reason="INVALID_VALUE",
                )
        elif len(text) > max_tokens * self._longest_token:
            at_least = -(-len(text) // self._longest_token)
            raise context_exceeded(f"at least {at_least}", max_tokens, field)

    def stop(self) -> None:
        """Stop the threads, without waiting for work that runs."""
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
        # The model may have more tokens than its tokenizer.
        size = sum(len(token_bytes[token]) for token in tokens if token < len(token_bytes))
        if size > most:
            raise InvalidRequest(
                f"the text of these tokens has up to {size} bytes: at most {most} are allowed; send them in parts",
                field=field,
                reason="INVALID_VALUE",
            )
        return self.tokenizer.decode([*tokens], skip_special_tokens)

    def _check_beginning(self, text: str, max_tokens: int | None, field: str) -> None:
        """Refuse a text whose beginning alone is far too long, without tokenising the rest.

        A cut may split a token and, rarely, change a few tokens before it. The margin accounts for that.
        """
        if max_tokens is None or len(text) <= (length := 8 * max_tokens):
            return
        count = 0
        for at in range(0, len(text), length):
            count += len(self.tokenizer.encode(text[at : at + length]))
            if count > max_tokens + max_tokens // 8 + 64:
                raise context_exceeded(f"more than {max_tokens}", max_tokens, field)

    async def _reserve(self, size: int) -> None:
        """Reserve ``size`` bytes, after all earlier callers."""
        if not self._queue and size <= self._free:
            self._free -= size
            return
        reserved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, reserved))
        try:
            await reserved
        except asyncio.CancelledError:
            self._release(0 if reserved.cancelled() else size)  # the reservation may have succeeded
            raise

    def _release(self, size: int) -> None:
        self._free += size
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            size, reserved = self._queue.popleft()
            if not reserved.cancelled():
                self._free -= size
                reserved.set_result(None)


def max_utf8_bytes(text: str) -> int:
    """Return the UTF-8 length of ``text``, or an upper bound if the text is too long to be encoded."""
    if text.isascii():
        return len(text)
    return len(text.encode(errors="surrogatepass")) if len(text) <= _ENCODED_CHARACTERS else 4 * len(text)


def check_unicode(texts: list[str], field: str) -> None:
    """Refuse texts with half of a surrogate pair, which Python reads from files that are not UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has half of a surrogate pair at character {error.start}, which no token represents; decode"
                " it with errors='replace'",
                field=field,
                reason="INVALID_VALUE",
            ) from None


def context_exceeded(prompt_tokens: int | str, max_context_tokens: int, field: str) -> InvalidRequest:
    """Return the error for a prompt that leaves no room for an answer.

    The wording is OpenAI's. Client libraries such as litellm recognise it and shorten the conversation.
    """
    what = "messages" if field == "messages" else "prompt"
    room = ", and the answer needs at least 1" if prompt_tokens == max_context_tokens else ""
    return InvalidRequest(
        f"This model's maximum context length is {max_context_tokens} tokens. However, your {what} resulted in"
        f" {prompt_tokens} tokens{room}. Please reduce the length of the {what}.",
        field=field,
        reason="CONTEXT_LENGTH_EXCEEDED",
    )
