"""From jobs to the HTTP response: run them, and write what comes back in the shape of the endpoint."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

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
from services.gateway.openai.logprobs import mean_logprob
from services.gateway.openai.packed_logprobs import pack
from services.gateway.openai.prompt_log import PromptLog
from services.gateway.openai.prompt_scores import echoed, prompt_logprobs
from services.gateway.openai.shapes import Shape
from services.gateway.openai.sse import EventStream
from services.gateway.openai.transcript import Piece, Transcript, whole_text

# More tokens than this are turned into text in a thread: the event loop has streams to feed. With logprobs it is far
# more work.
_INLINE_TOKENS, _INLINE_LOGPROBS = 8192, 1024
_INLINE_CHOICES = 1024  # whose usage is added up on the event loop
_FEW_CHOICES = 64  # of a stream, whose news are written in less than a millisecond


@dataclass(frozen=True)
class Answer:
    """One request on its way to an answer."""

    gateway: Gateway
    jobs: Sequence[PromptRequest]
    shape: Shape
    headers: dict[str, str]
    caller: Caller
    echo: Sequence[str] = ()  # what stands before the answers to each prompt
    best: int | None = None  # so many of each prompt's samples are told, most likely ones first; None: all

    async def respond(self, *, stream: bool) -> Response:
        """The response: whole, or a stream once every prompt is accepted. Raises ``TokaError``.

        A whole answer does not wait for the acceptance: it would only be woken twice.
        """
        self.shape.begin(self.jobs)
        if self._settings.return_token_ids:
            self.shape.tell_prompts(self.jobs)
        bounds = Bounds(self.gateway.guard.limits, self.caller, self.jobs)
        if self._log is not None:
            self._log.asked(self.jobs, self.gateway.text.vocabulary.with_specials)
        try:
            return await self._run(bounds, stream=stream)
        except DeadlineExceeded:  # what was made was asked for
            raise
        except TokaError:
            bounds.give_back()
            raise

    async def _run(self, bounds: Bounds, *, stream: bool) -> Response:
        generation = await self.gateway.fleet.generate(self.jobs, streaming=stream)
        for max_tokens, prompts in Counter(job.max_tokens for job in self.jobs).items():
            self.gateway.metrics.request_began(self._settings.n, max_tokens, prompts)
        handed_over = False
        try:
            bounds.begin(generation)
            headers = self.headers | {"x-request-id": self.shape.request_id}
            if stream:
                await generation.wait_accepted()
                handed_over = True
                return EventStream(
                    self.shape.until_error(self._told(self._events(generation))),
                    partial(self._close, generation, bounds),
                    headers,
                    self.shape.broken,
                )
            written = await (self._write_all(generation) if self.best is None else self._write_best(generation))
            self._measure(generation)
            await self.shape.settle(generation.samples)
            if len(generation.samples) > _INLINE_CHOICES:
                body = await self.gateway.text.in_thread(self.shape.whole, generation.samples, written)
            else:
                body = self.shape.whole(generation.samples, written)
            return Response(body, headers=headers, media_type="application/json")
        except InvalidRequest as error:
            raise self._in_callers_words(error) from None
        finally:
            if not handed_over:
                self._end(generation, bounds)

    async def _write_all(self, generation: ActiveRequest) -> list[bytes]:
        """Every choice as JSON, written soon after it ended: little is left to do after the last one."""
        written = [b""] * len(generation.samples)
        scored = self._settings.prompt_logprobs is not None
        most = _INLINE_LOGPROBS if generation.logprobs or scored else _INLINE_TOKENS
        while ended := await generation.wait_ended():
            if sum(self._prompt_work(choice) + choice.outcome.completion_tokens for choice in ended) > most:
                texts = await self.gateway.text.in_thread(self._write, ended)
            else:
                texts = self._write(ended)
            for choice, text in zip(ended, texts, strict=True):
                written[choice.index] = text
        return written

    async def _write_best(self, generation: ActiveRequest) -> list[bytes]:
        """The choices whose tokens are most likely on average, as JSON; best first, prompt after prompt."""
        while await generation.wait_ended():
            pass
        kept, samples = [], self._settings.n
        for first in range(0, len(generation.samples), samples):
            ranked = sorted(generation.samples[first : first + samples], key=mean_logprob, reverse=True)
            kept += ranked[: self.best]
        for index, choice in enumerate(kept):
            choice.index = index
        return await self.gateway.text.in_thread(self._write, kept)

    def _write(self, choices: Sequence[ActiveSample]) -> list[bytes]:
        return [self.shape.choice(choice, self._piece(choice)) for choice in choices]

    def _piece(self, choice: ActiveSample) -> Piece:
        token_ids = self._token_ids(choice)
        packed = None
        if self._settings.packed_logprobs:
            packed = pack(choice.new_ids, choice.logprobs, self._settings.top_logprobs)
        ids, logprobs = choice.take()
        self.shape.note(choice.index, ids)
        if not logprobs or packed is not None:
            text = whole_text(self._vocabulary, ids, choice.outcome)
            self._note(choice, text)
            return self._behind_prompt(choice, Piece(text, [], token_ids, packed=packed))
        transcript = self._transcript(choice)
        said = transcript.push(ids, logprobs)
        rest = transcript.finish(choice.outcome)
        self._note(choice, said.text + rest.text)
        return self._behind_prompt(choice, Piece(said.text + rest.text, said.entries + rest.entries, token_ids))

    async def _told(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        except TokaError as error:
            raise self.gateway.guard.told(self._in_callers_words(error)) from None

    def _in_callers_words(self, error: TokaError) -> TokaError:
        """A grammar is compiled before an answer begins; what is wrong with it may still be found in the middle."""
        grammar = self._settings.grammar
        if grammar is None or not isinstance(error, InvalidRequest) or error.field != GRAMMAR_FIELD:
            return error
        return explain(error, grammar)

    async def _events(self, generation: ActiveRequest) -> AsyncIterator[bytes]:
        shape = self.shape
        transcripts: dict[int, Transcript] = {}
        if beginning := shape.beginning():
            yield beginning
        time_slice, many = TimeSlice(), len(generation.samples) > _FEW_CHOICES
        told: set[int] = set()  # choices to their end: more news of one may come while a long prompt is written
        while news := await generation.wait_updated():
            chunks = []
            for choice in news:
                if many and time_slice.is_over:
                    await time_slice.renew()
                if choice.index in told:
                    continue
                opens = False
                if (transcript := transcripts.get(choice.index)) is None:
                    opens = True
                    transcript = transcripts[choice.index] = self._transcript(choice)
                    chunks.append(shape.opening(choice.index))
                token_ids = self._token_ids(choice)
                ids, logprobs = choice.take()
                shape.note(choice.index, ids)
                said = transcript.push(ids, logprobs)
                text, entries = said.text, said.entries
                reason = None
                if choice.ending is not None:
                    told.add(choice.index)
                    reason = choice.ending.reason
                    rest = transcript.finish(choice.ending)
                    text, entries = text + rest.text, entries + rest.entries
                self._note(choice, text)
                stop_reason = None if reason is None else choice.stop_reason
                piece = Piece(text, entries, token_ids, stop_reason=stop_reason)
                if opens and self._prompt_work(choice) > _INLINE_LOGPROBS:
                    piece = await self.gateway.text.in_thread(self._behind_prompt, choice, piece)
                elif opens:
                    piece = self._behind_prompt(choice, piece)
                if piece.text or piece.entries or piece.token_ids or reason:
                    chunks.append(shape.chunk(choice.index, piece, reason))
            if chunks:
                yield b"".join(chunks)
        self._measure(generation)
        await shape.settle(generation.samples)
        yield shape.ending(generation.samples)

    def _transcript(self, choice: ActiveSample) -> Transcript:
        behind = len(self.echo[choice.prompt_index]) if self.echo else 0
        return Transcript(self._vocabulary, self._settings.stop_strings, behind=behind)

    @property
    def _settings(self) -> Settings:
        return self.jobs[0].settings

    @property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self.gateway.text.vocabulary
        return vocabulary.with_specials if self._settings.special_tokens else vocabulary

    def _token_ids(self, choice: ActiveSample) -> list[int] | None:
        """Those that nobody has taken yet, a stop token included."""
        return list(map(int, choice.new_ids)) if self._settings.return_token_ids else None

    def _behind_prompt(self, choice: ActiveSample, piece: Piece) -> Piece:
        """A choice's first piece, or its only one, behind its prompt if that is to be told as well."""
        settings, number = self._settings, choice.prompt_index
        if settings.prompt_logprobs is None:
            return piece._replace(text=self.echo[number] + piece.text) if self.echo else piece
        prompt, scores = self.jobs[number].prompt_ids, choice.request.prompt_scores[number]
        if settings.requested_prompt_logprobs is not None:
            top, token_text = settings.requested_prompt_logprobs, self.gateway.text.token_text
            start = settings.prompt_logprobs_start
            piece = piece._replace(prompt_logprobs=prompt_logprobs(prompt, scores, top, token_text, start))
        if not self.echo:
            return piece
        return echoed(prompt, scores, settings.top_logprobs, self.echo[number], self._vocabulary, piece)

    def _prompt_work(self, choice: ActiveSample) -> int:
        """Tokens of the prompt whose log-probabilities are told with a choice."""
        return 0 if self._settings.prompt_logprobs is None else len(self.jobs[choice.prompt_index].prompt_ids)

    def _close(self, generation: ActiveRequest, bounds: Bounds, disconnected: bool) -> None:
        self._end(generation, bounds)
        if disconnected:
            self.gateway.metrics.count_disconnect()

    def _end(self, generation: ActiveRequest, bounds: Bounds) -> None:
        bounds.settle(generation)
        generation.close()
        if self._log is not None:
            self._log.ended()

    @cached_property
    def _log(self) -> PromptLog | None:
        return PromptLog(self.shape.request_id) if self.gateway.config.log_prompts else None

    def _note(self, choice: ActiveSample, text: str) -> None:
        if self._log is not None:
            self._log.answered(choice.index, text)

    def _measure(self, generation: ActiveRequest) -> None:
        metrics = self.gateway.metrics
        metrics.end_to_end.observe(time.perf_counter() - self.caller.started_at)
        if generation.first_token_at is not None:
            metrics.first_token.observe(generation.first_token_at - self.caller.started_at)
