"""From jobs to the HTTP response: run them, and write what comes back in the shape of the endpoint."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Response

from services.gateway.gateway import Gateway
from services.gateway.generation import Choice, Generation
from services.gateway.job import Job
from services.gateway.openai.shapes import Shape
from services.gateway.openai.sse import DONE, EventStream
from services.gateway.openai.transcript import Piece, Transcript, whole_text

# More tokens than this are turned into text in a thread: the event loop has streams to feed. With logprobs it is far
# more work.
_INLINE_TOKENS, _INLINE_LOGPROBS = 8192, 1024


@dataclass(frozen=True)
class Answer:
    """One request on its way to an answer. ``started_at`` is of ``time.perf_counter``."""

    gateway: Gateway
    jobs: Sequence[Job]
    shape: Shape
    headers: dict[str, str]
    started_at: float

    async def respond(self, *, stream: bool) -> Response:
        """The response: whole, or a stream once every prompt is accepted. Raises ``TokaError``.

        A whole answer does not wait for the acceptance: it would only be woken twice.
        """
        generation = self.gateway.fleet.generate(self.jobs, streaming=stream)
        handed_over = False
        try:
            headers = self.headers | {"x-request-id": self.shape.request_id}
            if stream:
                await generation.wait_accepted()
                handed_over = True
                return EventStream(self._events(generation), partial(self._close, generation), headers)
            written = await self._write_all(generation)
            self._measure(generation)
            body = self.shape.whole(generation.choices, written)
            return Response(body, headers=headers, media_type="application/json")
        finally:
            if not handed_over:
                generation.close()

    async def _write_all(self, generation: Generation) -> list[bytes]:
        """Every choice as JSON, written soon after it ended: little is left to do after the last one."""
        written = [b""] * len(generation.choices)
        most = _INLINE_LOGPROBS if generation.logprobs else _INLINE_TOKENS
        while ended := await generation.ended():
            if sum(choice.ending.completion_tokens for choice in ended) > most:
                texts = await self.gateway.text.in_thread(self._write, ended)
            else:
                texts = self._write(ended)
            for choice, text in zip(ended, texts, strict=True):
                written[choice.index] = text
        return written

    def _write(self, choices: Sequence[Choice]) -> list[bytes]:
        return [self.shape.choice(choice, self._piece(choice)) for choice in choices]

    def _piece(self, choice: Choice) -> Piece:
        ids, logprobs = choice.take()
        if not logprobs:
            return Piece(whole_text(self.gateway.text.vocabulary, ids, choice.ending), [])
        transcript = self._transcript(choice)
        said = transcript.push(ids, logprobs)
        rest = transcript.finish(choice.ending)
        return Piece(said.text + rest.text, said.entries + rest.entries)

    async def _events(self, generation: Generation) -> AsyncIterator[bytes]:
        shape = self.shape
        transcripts: dict[int, Transcript] = {}
        while news := await generation.news():
            chunks = []
            for choice in news:
                transcript = transcripts.get(choice.index)
                if transcript is None:
                    transcript = transcripts[choice.index] = self._transcript(choice)
                    chunks.append(shape.opening(choice.index))
                text, entries = transcript.push(*choice.take())
                reason = None
                if choice.ending is not None:
                    reason = choice.ending.reason
                    rest = transcript.finish(choice.ending)
                    text, entries = text + rest.text, entries + rest.entries
                if text or entries or reason:
                    chunks.append(shape.chunk(choice.index, Piece(text, entries), reason))
            if chunks:
                yield b"".join(chunks)
        self._measure(generation)
        yield shape.usage_chunk(generation.choices) + DONE

    def _transcript(self, choice: Choice) -> Transcript:
        return Transcript(self.gateway.text.vocabulary, self.jobs[choice.prompt_index].settings.stop_strings)

    def _close(self, generation: Generation, disconnected: bool) -> None:
        generation.close()
        if disconnected:
            self.gateway.metrics.count_disconnect()

    def _measure(self, generation: Generation) -> None:
        metrics = self.gateway.metrics
        metrics.end_to_end.observe(time.perf_counter() - self.started_at)
        if generation.first_token_at is not None:
            metrics.first_token.observe(generation.first_token_at - self.started_at)
