"""The JSON of answers: completions and chat, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Any

import orjson

from services.common.errors import TokaError
from services.common.text.vocabulary import TokenIds
from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import PromptRequest
from services.gateway.openai.logprobs import TokenText, completion_logprobs
from services.gateway.openai.packed_logprobs import Packed, fingerprint
from services.gateway.openai.sse import DONE, Template, error_event, event
from services.gateway.openai.transcript import Piece, TokenEntry
from services.gateway.openai.usage import usage_of


class Shape(ABC):
    """How one request's answer is written. ``token_text`` is set when logprobs were asked for."""

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        request_id: str,
        facts: ModelFacts,
        token_text: TokenText | None,
        *,
        include_usage: bool = False,
        running_usage: bool = False,
    ) -> None:
        """``include_usage``: a stream ends with its usage. ``running_usage``: each chunk has its choice's so far."""
        self.request_id = request_id
        self._token_text = token_text
        self._include_usage = include_usage
        self._running_usage = running_usage
        self._prompt_lengths: list[int] = []  # tokens, by choice; filled in for running usage
        self._token_counts: Counter[int] = Counter()  # generated so far, by choice; for running usage
        self._prompt_ids: list[list[int]] = []  # of each prompt, when token ids were asked for
        self._prompt_logprobs: list[Any] | None = None  # of the prompt whose choice was written last
        self._packed: dict[int, Packed] = {}  # log-probabilities by choice, when they go into the fingerprint
        self._untold: dict[int, list[int]] = {}  # the same by choice, until its first chunk
        self._head = {
            "id": request_id,
            "object": self.whole_object,
            "created": int(time.time()),
            "model": facts.id,
            "system_fingerprint": f"fp_{facts.tokenizer_fingerprint[:12]}",
        }

    @cached_property
    def _template(self) -> Template:
        return self._template_with({})

    def _template_with(self, extras: dict[str, Any]) -> Template:
        """For a chunk that has ``extras`` beside its choices."""
        between = {"usage": None} if self._include_usage and not self._running_usage else None
        return Template(self._chunk_head | extras, "choices", between)

    def _fill(self, template: Template, index: int, choice: bytes) -> bytes:
        """Return a chunk of ``template`` with ``choice``, and the usage so far of the choice ``index`` if wanted."""
        if not self._running_usage:
            return template.fill(choice)
        prompt, completion = self._prompt_lengths[index], self._token_counts[index]
        usage = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
        return template.fill(choice + usage % (prompt, completion, prompt + completion))

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head | {"object": self.chunk_object}

    def tell_prompts(self, jobs: Sequence[PromptRequest]) -> None:
        """Token ids were asked for: those of prompts are told as well."""
        self._prompt_ids = [job.prompt_ids.tolist() for job in jobs]
        by_choice = [ids for job, ids in zip(jobs, self._prompt_ids, strict=True) for _ in range(job.settings.n)]
        self._untold = dict(enumerate(by_choice))

    def begin(self, jobs: Sequence[PromptRequest]) -> None:
        """Take note of the requests before the first chunk."""
        if self._running_usage:
            self._prompt_lengths = [len(job.prompt_ids) for job in jobs for _ in range(job.settings.n)]

    async def settle(self, choices: Sequence[ActiveSample]) -> None:  # noqa: B027 (most have nothing to do)
        """Everything of the answer is there, and ``whole`` or ``ending`` comes next."""

    def until_error(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A stream's ``events``; and the last one, where the endpoint has its own, instead of a ``TokaError``."""
        return events

    def broken(self, error: TokaError) -> bytes:
        """Return the last event of a stream that ends with ``error``."""
        return error_event(error)

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        """The body of an answer that is not streamed. ``written``: what ``choice`` made of each."""
        fragments = [orjson.Fragment(text) for text in written]
        if self._packed:
            packed = [self._packed[index] for index in range(len(written))]
            self._head["system_fingerprint"] = fingerprint(packed)
        return orjson.dumps(self._head | {"choices": fragments, "usage": self._usage(choices)} | self._whole_extras())

    def beginning(self) -> bytes:
        """What comes before all choices."""
        return b""

    def ending(self, choices: Sequence[ActiveSample]) -> bytes:
        """What comes behind all choices."""
        return self.usage_chunk(choices) + DONE

    def opening(self, index: int) -> bytes:
        """What comes before the first chunk of a choice."""
        return b""

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        """A chunk with new text, and the finish reason in the last one of its choice."""
        return self._chunk(index, self._chunk_content(piece.text, reason is not None), piece, reason)

    def note(self, index: int, token_ids: TokenIds) -> None:
        """Take the tokens of a choice's next piece. Their text may be held back for a later piece."""
        if self._running_usage:
            self._token_counts[index] += len(token_ids)

    def _chunk(self, index: int, content: bytes, piece: Piece, reason: str | None) -> bytes:
        """A chunk with ``content``, and what ``piece`` has beside its text."""
        logprobs = b"null"
        if piece.entries and self._token_text is not None:
            logprobs = orjson.dumps(self._logprobs(piece.entries, self._token_text))
        finish = b"null" if reason is None else b'"%b"' % reason.encode()
        if reason is not None:
            finish += b',"stop_reason":%b' % orjson.dumps(piece.stop_reason)
        choice = b'[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]' % (index, content, logprobs, finish)
        if piece.token_ids is not None:
            extras = {"token_ids": piece.token_ids} | self._chunk_extras(index)
            choice = choice[:-2] + b"," + orjson.dumps(extras)[1:-1] + choice[-2:]
        return self._fill(self._template, index, choice)

    def usage_chunk(self, choices: Sequence[ActiveSample]) -> bytes:
        """The chunk after the last, when ``stream_options.include_usage`` asked for it."""
        if not self._include_usage:
            return b""
        return event(self._chunk_head | {"choices": [], "usage": self._usage(choices)})

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        """Return one whole choice as JSON."""
        logprobs = None if self._token_text is None else self._logprobs(piece.entries, self._token_text)
        content, reason = self._content(choice, piece.text)
        told = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}
        told["stop_reason"] = choice.stop_reason
        if piece.token_ids is not None:
            told |= {"token_ids": piece.token_ids} | self._choice_extras(choice)
        if piece.packed is not None:
            self._packed[choice.index] = piece.packed
        if piece.prompt_logprobs is not None:
            self._prompt_logprobs = piece.prompt_logprobs
            told |= self._scores()
        return b"%b" % orjson.dumps(told)  # a copy: orjson returns buffers of 4 KiB, and thousands of choices are kept

    def _usage(self, choices: Sequence[ActiveSample]) -> dict[str, Any]:
        """``usage`` of the answer."""
        return usage_of(choices)

    def _whole_extras(self) -> dict[str, Any]:
        """What an answer holds beside its choices."""
        return {}

    def _choice_extras(self, choice: ActiveSample) -> dict[str, Any]:
        """What a whole choice holds beside its token ids."""
        return {}

    def _scores(self) -> dict[str, Any]:
        """What a whole choice holds when log-probabilities of its prompt were asked for."""
        return {}

    def _chunk_extras(self, index: int) -> dict[str, Any]:
        """What a chunk's choice holds beside its token ids."""
        return {}

    @abstractmethod
    def _content(self, choice: ActiveSample, text: str) -> tuple[dict[str, Any], str]:
        """What a whole choice holds its text in, and its finish reason."""

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenEntry], token_text: TokenText) -> dict[str, Any]:
        """``logprobs`` of a choice."""

    @abstractmethod
    def _chunk_content(self, text: str, last: bool) -> bytes:
        """What a chunk holds its text in, as a member of a JSON object."""


class CompletionShape(Shape):
    """``/v1/completions``."""

    whole_object = chunk_object = "text_completion"

    def _content(self, choice: ActiveSample, text: str) -> tuple[dict[str, Any], str]:
        return {"text": text}, choice.outcome.reason

    def _choice_extras(self, choice: ActiveSample) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids[choice.prompt_index]}

    def _scores(self) -> dict[str, Any]:
        return {"prompt_logprobs": self._prompt_logprobs}

    def _chunk_extras(self, index: int) -> dict[str, Any]:
        ids = self._untold.pop(index, None)
        return {} if ids is None else {"prompt_token_ids": ids}

    def _logprobs(self, entries: Sequence[TokenEntry], token_text: TokenText) -> dict[str, Any]:
        return completion_logprobs(entries, token_text)

    def _chunk_content(self, text: str, last: bool) -> bytes:
        return b'"text":' + orjson.dumps(text)
