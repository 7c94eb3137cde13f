"""Tokenization off the event loop. Small texts of several requests share a batch. Large requests have their own."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from services.common.errors import InvalidRequest
from services.common.text.encoder import AT_ONCE_BYTES, TextEncoder, check_unicode, context_exceeded, max_utf8_bytes
from services.common.text.tokenizer import Tokenizer

INLINE_BYTES = 64 * 1024  # more work than this runs in a thread, so as not to block the event loop
BATCH_CHARACTERS = 64 * 1024  # a larger request does not join the shared batch
_TOKEN_TEXTS = 16_384  # cached entries, about 300 bytes each

R = TypeVar("R")
_Waiting: TypeAlias = tuple[list[str], "asyncio.Future[list[list[int]]]"]


class TextEngine:
    """The gateway's tokenizer. Its methods are called on the event loop, and run in threads of the encoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.vocabulary
        self._encoder = TextEncoder(tokenizer)
        self.in_thread, self.decode, self.stop = self._encoder.in_thread, self._encoder.decode, self._encoder.stop
        self._waiting: deque[_Waiting] = deque()
        self._batcher: asyncio.Task[None] | None = None
        self.token_text = lru_cache(maxsize=_TOKEN_TEXTS)(self._token_text)

    async def encode(
        self, texts: list[str], *, max_tokens: int | None, field: str, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text.

        Raises ``InvalidRequest`` for a text that is not valid Unicode, or that certainly exceeds ``max_tokens`` (None:
        only the encoder's own bounds apply).
        """
        if not add_special_tokens or sum(map(len, texts)) > BATCH_CHARACTERS:
            return await self._encoder.encode(
                texts, max_tokens=max_tokens, field=field, add_special_tokens=add_special_tokens
            )
        for text in texts:
            self._encoder.check_length(text, max_tokens, field)
        check_unicode(texts, field)
        future: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((texts, future))
        if self._batcher is None:
            self._batcher = asyncio.create_task(self._encode_waiting())
        return await future

    async def encode_chat(
        self,
        messages: Callable[[], list[dict[str, Any]]],
        *,
        add_generation_prompt: bool,
        max_tokens: int | None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """Return text and token ids of a conversation in the model's chat template. Raises ``InvalidRequest``.

        ``messages`` is called in a thread, before ``variables`` are read.
        """

        def render() -> str:
            return self.tokenizer.render_chat(
                messages(),
                add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )

        return await self._encoder.encode_chat(
            render, max_tokens=max_tokens, field="messages", add_special_tokens=add_special_tokens
        )

    async def worked(self, size: int, work: Callable[..., R], *arguments: Any) -> R:
        """Run ``work(*arguments)`` on about ``size`` bytes, in a thread if that is more than ``INLINE_BYTES``."""
        return work(*arguments) if size <= INLINE_BYTES else await self.in_thread(work, *arguments)

    async def _encode_waiting(self) -> None:
        """Encode waiting requests in batches of about ``AT_ONCE_BYTES``, until none waits."""
        try:
            while self._waiting:
                batch, size = [self._waiting.popleft()], 0
                while self._waiting and (size := size + sum(map(max_utf8_bytes, batch[-1][0]))) < AT_ONCE_BYTES:
                    batch.append(self._waiting.popleft())
                if not await self._encode_together(batch):
                    for request in batch:  # only the request that cannot be encoded may fail
                        await self._encode_together([request])
        finally:
            self._batcher = None

    async def _encode_together(self, batch: list[_Waiting]) -> bool:
        """Encode ``batch`` and set its futures. If several requests cannot be encoded together, return False."""
        texts = [text for part, _ in batch for text in part]
        try:
            encoded = iter(await self.in_thread(self.tokenizer.encode_batch, texts))
        except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
            if len(batch) > 1:
                return False
            [(_, future)] = batch
            if not future.done():
                future.set_exception(error)
            return True
        for part, future in batch:
            ids = [next(encoded) for _ in part]
            if not future.done():
                future.set_result(ids)
        return True

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return text and bytes of a single token, for logprobs. Incomplete characters become U+FFFD in the text."""
        known = self.vocabulary.token_bytes[token_id] if token_id < self.vocabulary.size else b""
        if not known:
            known = self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return known.decode(errors="replace"), known


def check_token_ids(prompt: np.ndarray, vocab_size: int, max_context_tokens: int, field: str) -> None:
    """Raise ``InvalidRequest`` if the prompt is empty, too long, or has ids outside the vocabulary."""
    if not len(prompt):
        raise InvalidRequest("the prompt has no tokens; give at least one", field=field, reason="EMPTY_PROMPT")
    if len(prompt) >= max_context_tokens:
        raise context_exceeded(len(prompt), max_context_tokens, field)
    if prompt.max() >= vocab_size:
        wrong = prompt[prompt >= vocab_size][0]
        raise InvalidRequest(
            f"token id {wrong} does not exist: this model has ids 0 to {vocab_size - 1}",
            field=field,
            reason="UNKNOWN_TOKEN",
        )
