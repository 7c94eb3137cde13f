"""Runs compiled requests, and writes their samples as the HTTP response of an endpoint."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from fastapi import Response

from services.common.errors import DeadlineExceeded, InvalidRequest, TokaError
from services.common.process.time_slice import TimeSlice
from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.active_request import ActiveRequest, ActiveSample
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.http.bounds import Bounds
from services.gateway.http.request import Caller
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.grammar.answer import GRAMMAR_FIELD, explain
from services.gateway.openai.logprobs import echoed, prompt_logprobs, rank
from services.gateway.openai.packed_logprobs import pack
from services.gateway.openai.prompt_log import PromptLog
from services.gateway.openai.routed_experts import encode_experts
from services.gateway.openai.shapes import Shape
from services.gateway.openai.sse import EventStream
from services.gateway.openai.transcript import Piece, Transcript, whole_text

# Maximum number of tokens that become text on the event loop. More tokens would delay other streams, so a thread does
# it. Tokens with log-probabilities are far more work.
_INLINE_TOKENS, _INLINE_LOGPROBS = 8192, 1024
# Maximum number of choices whose usage is summed on the event loop.
_INLINE_CHOICES = 1024
# Maximum number of choices of a stream whose chunks are written without a pause, in less than a millisecond.
_FEW_CHOICES = 64


@dataclass(frozen=True)
class Answer:
    """The answer to one request: its prompts, its shape, and the caller who gets it."""

    gateway: Gateway
    prompts: Sequence[PromptRequest]
    shape: Shape
    headers: dict[str, str]
    caller: Caller
    echo: Sequence[str] = ()  # text before the samples, by prompt
    best: int | None = None  # number of samples to return for each prompt, the most likely first. None: all samples

    async def respond(self, *, stream: bool) -> Response:
        """Return the whole response, or with ``stream`` a stream. Raises ``TokaError``.

        A stream begins when a scheduler has accepted every prompt. A whole response does not wait for that, since
        waiting twice would wake this task twice.
        """
        self.shape.begin(self.prompts)
        bounds = Bounds(self.gateway.guard.limits, self.caller, self.prompts)
        if self._log is not None:
            self._log.log_prompts(self.prompts, self.gateway.text.vocabulary.with_specials)
        try:
            return await self._run(bounds, stream=stream)
        except DeadlineExceeded:  # the caller pays for the tokens that were generated before the deadline
            raise
        except TokaError:
            bounds.give_back()
            raise

    async def _run(self, bounds: Bounds, *, stream: bool) -> Response:
        active = await self.gateway.fleet.generate(self.prompts, streaming=stream)
        for max_tokens, count in Counter(prompt.max_tokens for prompt in self.prompts).items():
            self.gateway.metrics.request_began(self._settings.n, max_tokens, count)
        handed_over = False
        try:
            bounds.begin(active)
            headers = self.headers | {"x-request-id": self.shape.request_id}
            if stream:
                await active.wait_accepted()
                handed_over = True
                return EventStream(
                    self.shape.until_error(self._explained(self._events(active))),
                    partial(self._close, active, bounds),
                    headers,
                    self.shape.broken,
                )
            written = await (self._write_all(active) if self.best is None else self._write_best(active))
            self._measure(active)
            await self.shape.settle(active.samples)
            if len(active.samples) > _INLINE_CHOICES:
                body = await self.gateway.text.in_thread(self.shape.whole, active.samples, written)
            else:
                body = self.shape.whole(active.samples, written)
            return Response(body, headers=headers, media_type="application/json")
        except InvalidRequest as error:
            raise self._explain(error) from None
        finally:
            if not handed_over:
                self._end(active, bounds)

    async def _write_all(self, active: ActiveRequest) -> list[bytes]:
        """Return every choice as JSON. Each is written when it ends, so that little work follows the last token."""
        written = [b""] * len(active.samples)
        most = _INLINE_LOGPROBS if active.logprobs or self._returns_prompt else _INLINE_TOKENS
        while ended := await active.wait_ended():
            if sum(self._prompt_work(choice) + choice.outcome.completion_tokens for choice in ended) > most:
                texts = await self.gateway.text.in_thread(self._write, ended)
            else:
                texts = self._write(ended)
            for choice, text in zip(ended, texts, strict=True):
                written[choice.index] = text
        return written

    async def _write_best(self, active: ActiveRequest) -> list[bytes]:
        """Return the ``best`` choices of each prompt as JSON, those with the highest mean log-probability first."""
        while await active.wait_ended():
            pass
        kept, samples = [], self._settings.n
        for first in range(0, len(active.samples), samples):
            ranked = sorted(active.samples[first : first + samples], key=rank, reverse=True)
            kept += ranked[: self.best]
        for index, choice in enumerate(kept):
            choice.index = index
        return await self.gateway.text.in_thread(self._write, kept)

    def _write(self, choices: Sequence[ActiveSample]) -> list[bytes]:
        return [self.shape.choice(choice, self._piece(choice)) for choice in choices]

    def _piece(self, choice: ActiveSample) -> Piece:
        token_ids, routed = self._token_ids(choice), self._experts(choice)
        packed = None
        if self._settings.packed_logprobs:
            packed = pack(choice.new_ids, choice.logprobs, self._settings.top_logprobs)
        ids, logprobs = choice.take()
        self.shape.add_tokens(choice.index, ids)
        if not logprobs or packed is not None:
            text = whole_text(self._vocabulary, ids, choice.outcome)
            self._log_text(choice, text)
            return self._after_prompt(choice, Piece(text, [], token_ids, packed=packed, routed_experts=routed))
        transcript = self._transcript(choice)
        begun = transcript.push(ids, logprobs)
        rest = transcript.finish(choice.outcome)
        self._log_text(choice, begun.text + rest.text)
        piece = Piece(begun.text + rest.text, begun.entries + rest.entries, token_ids, routed_experts=routed)
        return self._after_prompt(choice, piece)

    async def _explained(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield ``events``. Raises the error that ends them in words for the caller."""
        try:
            async for event in events:
                yield event
        except TokaError as error:
            raise self.gateway.guard.told(self._explain(error)) from None

    def _explain(self, error: TokaError) -> TokaError:
        """Return ``error``. If the scheduler rejected the grammar, the error names the caller's field.

        The scheduler compiles a grammar before the answer begins, but may reject it later.
        """
        grammar = self._settings.grammar
        if grammar is None or not isinstance(error, InvalidRequest) or error.field != GRAMMAR_FIELD:
            return error
        return explain(error, grammar)

    async def _events(self, active: ActiveRequest) -> AsyncIterator[bytes]:
        shape = self.shape
        transcripts: dict[int, Transcript] = {}
        if beginning := shape.beginning():
            yield beginning
        time_slice, many = TimeSlice(), len(active.samples) > _FEW_CHOICES
        # Choices whose last chunk was written. They can be updated again while the log-probabilities of a long prompt
        # are written in a thread.
        complete: set[int] = set()
        while updated := await active.wait_updated():
            chunks = []
            for choice in updated:
                if many and time_slice.is_over:
                    await time_slice.renew()
                if choice.index in complete:
                    continue
                opens = False
                if (transcript := transcripts.get(choice.index)) is None:
                    opens = True
                    transcript = transcripts[choice.index] = self._transcript(choice)
                    chunks.append(shape.opening(choice.index))
                token_ids, count = self._token_ids(choice), len(choice.new_ids)
                ids, logprobs = choice.take()
                shape.add_tokens(choice.index, ids, without_text=count - len(ids))
                text, entries, *_ = transcript.push(ids, logprobs)
                reason = None
                if choice.ending is not None:
                    complete.add(choice.index)
                    reason = choice.ending.reason
                    rest = transcript.finish(choice.ending)
                    text, entries = text + rest.text, entries + rest.entries
                self._log_text(choice, text)
                stop_reason = None if reason is None else choice.stop_reason
                weights = () if choice.ending is None else choice.ending.weights
                piece = Piece(text, entries, token_ids, weights=weights, stop_reason=stop_reason, ending=choice.ending)
                if choice.ending is not None and choice.experts is not None:
                    experts = await self.gateway.text.in_thread(self._experts, choice)
                    piece = piece._replace(routed_experts=experts)
                if opens and self._prompt_work(choice) > _INLINE_LOGPROBS:
                    piece = await self.gateway.text.in_thread(self._after_prompt, choice, piece)
                elif opens:
                    piece = self._after_prompt(choice, piece)
                if piece.text or piece.entries or piece.token_ids or reason:
                    chunks.append(shape.chunk(choice.index, piece, reason))
            if chunks:
                yield b"".join(chunks)
        self._measure(active)
        await shape.settle(active.samples)
        yield shape.ending(active.samples)

    def _transcript(self, choice: ActiveSample) -> Transcript:
        offset = len(self.echo[choice.prompt_index]) if self.echo else 0
        return Transcript(self._vocabulary, self._settings.stop_strings, offset=offset)

    @property
    def _settings(self) -> Settings:
        return self.prompts[0].settings

    @property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self.gateway.text.vocabulary
        return vocabulary.with_specials if self._settings.special_tokens else vocabulary

    def _token_ids(self, choice: ActiveSample) -> list[int] | None:
        """Return the token ids since the last ``take``, a stop token included, or None if the caller wants none."""
        return list(map(int, choice.new_ids)) if self._settings.return_token_ids else None

    def _experts(self, choice: ActiveSample) -> str | None:
        """Return the experts of the tokens of a choice that has ended, or None if the caller wants none."""
        layout, experts = self._settings.routed_experts, choice.experts
        choice.experts = None  # they may take megabytes
        return None if layout is None or experts is None else encode_experts(experts.data, layout)

    def _after_prompt(self, choice: ActiveSample, piece: Piece) -> Piece:
        """Return the first piece of a choice with its prompt before it, as far as the caller wants the prompt."""
        settings, number = self._settings, choice.prompt_index
        prompt, scores = self.prompts[number].prompt_ids, choice.request.prompt_scores[number]
        scored = settings.prompt_logprobs is not None and choice.request.scored_end(number) >= len(prompt)
        if scored and settings.requested_prompt_logprobs is not None:
            kept = self._prompt_logprobs
            if number not in kept:
                kept.clear()
                top, token_text = settings.requested_prompt_logprobs, self.gateway.text.token_text
                kept[number] = prompt_logprobs(prompt, scores, top, token_text, settings.prompt_logprobs_start)
            piece = piece._replace(prompt_logprobs=kept[number])
        if not self.echo:
            return piece
        if scored and self.shape.returns_logprobs:
            return echoed(prompt, scores, settings.top_logprobs, self.echo[number], self._vocabulary, piece)
        return piece._replace(text=self.echo[number] + piece.text)

    @cached_property
    def _prompt_logprobs(self) -> dict[int, list[dict[str, Any] | None]]:
        """``prompt_logprobs`` by the number of the prompt. Holds only the last prompt, whose samples share them."""
        return {}

    def _prompt_work(self, choice: ActiveSample) -> int:
        """Return the number of prompt tokens about which data is returned with a choice."""
        return len(self.prompts[choice.prompt_index].prompt_ids) if self._returns_prompt else 0

    @property
    def _returns_prompt(self) -> bool:
        """True if log-probabilities or experts of prompt tokens are returned."""
        return self._settings.prompt_logprobs is not None or self._settings.routed_experts is not None

    def _close(self, active: ActiveRequest, bounds: Bounds, disconnected: bool) -> None:
        self._end(active, bounds)
        if disconnected:
            self.gateway.metrics.count_disconnect()

    def _end(self, active: ActiveRequest, bounds: Bounds) -> None:
        bounds.settle(active)
        active.close()
        if self._log is not None:
            self._log.log_answers()

    @cached_property
    def _log(self) -> PromptLog | None:
        return PromptLog(self.shape.request_id) if self.gateway.config.log_prompts else None

    def _log_text(self, choice: ActiveSample, text: str) -> None:
        if self._log is not None:
            self._log.add_text(choice.index, text)

    def _measure(self, active: ActiveRequest) -> None:
        metrics = self.gateway.metrics
        metrics.end_to_end.observe(time.perf_counter() - self.caller.started_at)
        if active.first_token_at is not None:
            metrics.first_token.observe(active.first_token_at - self.caller.started_at)
