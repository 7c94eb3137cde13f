"""The JSON of answers, as one object or in the chunks of a stream."""

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
    """The form in which an endpoint writes the answer to one request.

    ``token_text`` returns the text and the bytes of a token. None: the caller wants no log-probabilities.
    """

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
        """Create the shape.

        ``include_usage``: a stream ends with its usage. ``running_usage``: each chunk has the usage of its choice.
        """
        self.request_id = request_id
        self._token_text = token_text
        self._include_usage = include_usage
        self._running_usage = running_usage
        self._prompt_lengths: list[int] = []  # prompt tokens by choice, for running usage
        self._token_counts: Counter[int] = Counter()  # generated tokens by choice, for running usage
        self._prompt_ids: list[list[int]] = []  # token ids by prompt, if the caller wants them
        self._unsent_prompt_ids: dict[int, list[int]] = {}  # the same by choice, until its first chunk
        self._prompt_logprobs: list[Any] | None = None  # of the prompt whose choice was written last
        self._packed: dict[int, Packed] = {}  # log-probabilities by choice, for the fingerprint
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
        """Return the template of a chunk that has ``extras`` beside its choices."""
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

    @property
    def returns_logprobs(self) -> bool:
        """True if the answer has log-probabilities of its tokens."""
        return self._token_text is not None

    def begin(self, prompts: Sequence[PromptRequest]) -> None:
        """Store the prompts, before the answer begins."""
        if self._running_usage:
            self._prompt_lengths = [len(prompt.prompt_ids) for prompt in prompts for _ in range(prompt.settings.n)]
        if prompts[0].settings.return_token_ids:
            self._prompt_ids = [prompt.prompt_ids.tolist() for prompt in prompts]
            by_choice = [
                ids for prompt, ids in zip(prompts, self._prompt_ids, strict=True) for _ in range(prompt.settings.n)
            ]
            self._unsent_prompt_ids = dict(enumerate(by_choice))

    async def settle(self, choices: Sequence[ActiveSample]) -> None:  # noqa: B027 (most shapes do nothing)
        """Finish the answer, before ``whole`` or ``ending`` is called. Shapes that store the answer do it here."""

    def until_error(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return the ``events`` of a stream. Some endpoints replace a ``TokaError`` by an event of their own."""
        return events

    def broken(self, error: TokaError) -> bytes:
        """Return the last event of a stream that ends with ``error``."""
        return error_event(error)

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        """Return the body of an answer that is not streamed. ``written``: the JSON of each choice."""
        fragments = [orjson.Fragment(text) for text in written]
        if self._packed:
            packed = [self._packed[index] for index in range(len(written))]
            self._head["system_fingerprint"] = fingerprint(packed)
        return orjson.dumps(self._head | {"choices": fragments, "usage": self._usage(choices)} | self._whole_extras())

    def beginning(self) -> bytes:
        """Return the events before all choices."""
        return b""

    def ending(self, choices: Sequence[ActiveSample]) -> bytes:
        """Return the events after all choices: the chunk with the usage if the caller wants it, and the end mark."""
        if not self._include_usage:
            return DONE
        return event(self._chunk_head | {"choices": [], "usage": self._usage(choices)}) + DONE

    def opening(self, index: int) -> bytes:
        """Return the events before the first chunk of a choice."""
        return b""

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        """Return a chunk with a choice's next ``piece``. ``reason``: the finish reason if it is the last piece."""
        return self._chunk(index, self._chunk_content(piece.text, reason is not None), piece, reason)

    def add_tokens(self, index: int, token_ids: TokenIds, *, without_text: int = 0) -> None:
        """Count the tokens of a choice's next piece. Their text may be held back for a later piece.

        ``without_text``: the number of further tokens, which end the choice and are no part of its text.
        """
        if self._running_usage:
            self._token_counts[index] += len(token_ids) + without_text

    def _chunk(self, index: int, content: bytes, piece: Piece, reason: str | None) -> bytes:
        """Return a chunk with ``content``, and with the other data of ``piece``."""
        logprobs = b"null"
        if piece.entries and self._token_text is not None:
            logprobs = orjson.dumps(self._logprobs(piece.entries, self._token_text))
        finish = b"null" if reason is None else b'"%b"' % reason.encode()
        if reason is not None:
            finish += b',"stop_reason":%b' % orjson.dumps(piece.stop_reason)
            if piece.weights:
                finish += b',"weights":%b' % orjson.dumps(_spans(piece.weights))
            if piece.routed_experts is not None:
                finish += b',"routed_experts":"%b"' % piece.routed_experts.encode()
        choice = b'[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]' % (index, content, logprobs, finish)
        if piece.token_ids is not None:
            extras = {"token_ids": piece.token_ids} | self._chunk_extras(index)
            choice = choice[:-2] + b"," + orjson.dumps(extras)[1:-1] + choice[-2:]
        return self._fill(self._template, index, choice)

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        """Return one whole choice as JSON."""
        logprobs = None if self._token_text is None else self._logprobs(piece.entries, self._token_text)
        content, reason = self._content(choice, piece.text)
        document = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}
        document["stop_reason"] = choice.stop_reason
        if choice.outcome.weights:
            document["weights"] = _spans(choice.outcome.weights)
        if piece.routed_experts is not None:
            document["routed_experts"] = piece.routed_experts
        if piece.token_ids is not None:
            document["token_ids"] = piece.token_ids
        if piece.packed is not None:
            self._packed[choice.index] = piece.packed
        if piece.prompt_logprobs is not None:
            self._prompt_logprobs = piece.prompt_logprobs
        document |= self._choice_extras(choice, piece)
        # A copy, because orjson returns buffers of 4 KiB and thousands of choices are kept.
        return b"%b" % orjson.dumps(document)

    def _usage(self, choices: Sequence[ActiveSample]) -> dict[str, Any]:
        """Return ``usage`` of the answer."""
        return usage_of(choices)

    def _whole_extras(self) -> dict[str, Any]:
        """Return the members of a whole answer besides its choices and its usage."""
        return {}

    def _choice_extras(self, choice: ActiveSample, piece: Piece) -> dict[str, Any]:
        """Return the members of a whole choice for its prompt."""
        return {}

    def _chunk_extras(self, index: int) -> dict[str, Any]:
        """Return the members of a chunk's choice that go with its token ids."""
        return {}

    @abstractmethod
    def _content(self, choice: ActiveSample, text: str) -> tuple[dict[str, Any], str]:
        """Return the members of a whole choice for its text, and its finish reason."""

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenEntry], token_text: TokenText) -> dict[str, Any]:
        """Return ``logprobs`` of a choice."""

    @abstractmethod
    def _chunk_content(self, text: str, last: bool) -> bytes:
        """Return the member of a chunk's choice for its text, as JSON without braces."""


def _spans(weights: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return which weights generated how many tokens, in order. This is an extension of OpenAI's choices."""
    return [{"version": version, "tokens": tokens} for version, tokens in weights]


class CompletionShape(Shape):
    """The shape of ``/v1/completions``."""

    whole_object = chunk_object = "text_completion"

    def _content(self, choice: ActiveSample, text: str) -> tuple[dict[str, Any], str]:
        return {"text": text}, choice.outcome.reason

    def _choice_extras(self, choice: ActiveSample, piece: Piece) -> dict[str, Any]:
        extras = {"prompt_token_ids": self._prompt_ids[choice.prompt_index]} if self._prompt_ids else {}
        return extras if piece.prompt_logprobs is None else extras | {"prompt_logprobs": piece.prompt_logprobs}

    def _chunk_extras(self, index: int) -> dict[str, Any]:
        ids = self._unsent_prompt_ids.pop(index, None)
        return {} if ids is None else {"prompt_token_ids": ids}

    def _logprobs(self, entries: Sequence[TokenEntry], token_text: TokenText) -> dict[str, Any]:
        return completion_logprobs(entries, token_text)

    def _chunk_content(self, text: str, last: bool) -> bytes:
        return b'"text":' + orjson.dumps(text)
