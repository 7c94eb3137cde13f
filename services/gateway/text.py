"""Prompts to token ids, off the event loop: small texts of many requests in one batch, large ones by themselves."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from services.common.errors import InvalidRequest
from services.common.text.tokenizer import Tokenizer

THREADS = 4
INLINE_BYTES = 64 * 1024  # work on more is for a thread: the event loop has streams to feed
BATCH_CHARACTERS = 64 * 1024  # a larger request does not wait in, nor hold up, the common batch
_TOKEN_TEXTS = 16_384  # kept, some 300 bytes each
_LONGEST_SPECIAL = 64  # bytes of text that a special token may stand for

R = TypeVar("R")


class TextEngine:
    """Owned by the gateway; called on its event loop, works in its own threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.vocabulary
        self._longest_token = max(_LONGEST_SPECIAL, *(len(token) for token in self.vocabulary.token_bytes))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._waiting: list[tuple[list[str], asyncio.Future[list[list[int]]]]] = []
        self._batcher: asyncio.Task[None] | None = None
        self.token_text = lru_cache(maxsize=_TOKEN_TEXTS)(self._token_text)

    async def encode(
        self, texts: list[str], *, max_tokens: int | None, field: str, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text. ``InvalidRequest`` for one that cannot fit into ``max_tokens`` (None: any may be as
        long as it is), found cheaply, and for one that is no Unicode."""
        if max_tokens is not None:
            for text in texts:
                self.check_length(text, max_tokens, field)
        if not add_special_tokens or sum(map(len, texts)) > BATCH_CHARACTERS:
            return await self.in_thread(self._encode_large, texts, max_tokens, field, add_special_tokens)
        check_unicode(texts, field)
        future: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((texts, future))
        if self._batcher is None:
            self._batcher = asyncio.create_task(self._encode_waiting())
        return await future

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        max_tokens: int | None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """Text and token ids of a conversation under the model's template. Raises ``InvalidRequest``.

        What counts is the rendered text: a template may leave out much of the messages, such as old reasoning.
        """
        render = partial(
            self.tokenizer.render_chat,
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return await self.in_thread(self._encode_chat, render, max_tokens, add_special_tokens)

    async def in_thread(self, work: Callable[..., R], *arguments: Any) -> R:
        """``work(*arguments)`` in one of the engine's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def worked(self, size: int, work: Callable[..., R], *arguments: Any) -> R:
        """``work(*arguments)``, which is about ``size`` bytes; in a thread when that is much."""
        return work(*arguments) if size <= INLINE_BYTES else await self.in_thread(work, *arguments)

    def check_length(self, text: str, max_tokens: int, field: str) -> None:
        """Refuse, without tokenising, a text with more bytes than ``max_tokens`` of the longest token."""
        if len(text) > max_tokens * self._longest_token:
            at_least = -(-len(text) // self._longest_token)
            raise context_exceeded(f"at least {at_least}", max_tokens, field)

    def stop(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode_waiting(self) -> None:
        """Encode all that waits in one batch, then what has come meanwhile, until there is nothing."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                if not await self._encode_together(batch):
                    for request in batch:  # one of them is to blame, and only that one is to fail
                        await self._encode_together([request])
        finally:
            self._batcher = None

    async def _encode_together(self, batch: list[tuple[list[str], asyncio.Future[list[list[int]]]]]) -> bool:
        """False, and nobody told, when several could not be encoded."""
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

    def _encode_chat(
        self, render: Callable[[], str], max_tokens: int | None, add_special_tokens: bool
    ) -> tuple[str, list[int]]:
        text = render()
        if max_tokens is not None:
            self.check_length(text, max_tokens, "messages")
            self._check_beginning(text, max_tokens, "messages")
        return text, self.tokenizer.encode(text, add_special_tokens)

    def _encode_large(
        self, texts: list[str], max_tokens: int | None, field: str, add_special_tokens: bool
    ) -> list[list[int]]:
        check_unicode(texts, field)
        if max_tokens is not None:
            for text in texts:
                self._check_beginning(text, max_tokens, field)
        return self.tokenizer.encode_batch(texts, add_special_tokens)

    def _check_beginning(self, text: str, max_tokens: int, field: str) -> None:
        """Refuse a text of which the beginning alone is far too long: megabytes need not be tokenised for that.

        The cut may split a token and, rarely, change the few before it; hence the margin.
        """
        beginning = text[: 8 * max_tokens]
        if len(beginning) < len(text):
            count = len(self.tokenizer.encode(beginning))
            if count > max_tokens + max_tokens // 8 + 64:
                raise context_exceeded(f"more than {max_tokens}", max_tokens, field)

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token by itself, as logprobs show it: text (U+FFFD for half a character) and bytes."""
        known = self.vocabulary.token_bytes[token_id] if token_id < self.vocabulary.size else b""
        if not known:
            known = self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return known.decode(errors="replace"), known


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
    """The error for a prompt that leaves no room for an answer."""
    return InvalidRequest(
        f"this model's context is {max_context_tokens} tokens, prompt and answer together, but the prompt has"
        f" {prompt_tokens} tokens; shorten the prompt",
        field=field,
        reason="CONTEXT_LENGTH_EXCEEDED",
    )


def check_token_ids(prompt: np.ndarray, vocab_size: int, max_context_tokens: int, field: str) -> None:
    """Refuse a prompt that is empty, too long, or has ids the model does not know."""
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
