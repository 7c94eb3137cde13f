"""Prompts to answers over one session with each scheduler: a gateway without HTTP. Lives on one event loop."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from services.client.engine import Engine
from services.client.outputs import CompletionOutput, RequestOutput, StreamOutput, Usage
from services.client.request import Prepared, Request, check, prepare
from services.common.errors import InvalidRequest, Overloaded, TokaError, Unavailable
from services.common.rpc.channel import PLAIN, Dialer
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.active_request import ActiveRequest, ActiveSample
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.session import Timings
from services.gateway.engine.text import TextEngine
from services.gateway.openai.prompt_scores import prompt_logprobs
from services.gateway.openai.transcript import Transcript, whole_text

# Samples at the schedulers at once: far more than run, far less than fill their queues.
OUTSTANDING = 16_384
# For the first scheduler to be there.
CONNECT_S = 30.0
# Of prompts that are turned into tokens together.
AT_ONCE = 1024
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0


class Runner:
    """``patience_s``: how long a prompt waits for a scheduler that is away."""

    def __init__(
        self,
        addresses: Sequence[str],
        tokenizer: Tokenizer,
        engine: Engine | None,
        *,
        patience_s: float,
        dialer: Dialer = PLAIN,
    ) -> None:
        self.text = TextEngine(tokenizer)
        self._engine = engine
        self._fleet = Fleet(
            addresses,
            tokenizer_fingerprint=tokenizer.fingerprint,
            metrics=RequestMetrics(),
            timings=Timings(wait_for_ready=CONNECT_S, failover=patience_s),
            dialer=dialer,
        )
        self._facts: ModelFacts | None = None  # once there was a scheduler
        self._closing = asyncio.Event()
        self._asked: set[asyncio.Task[Any]] = set()  # those that run ``generate``
        self._watching: asyncio.Task[None] | None = None
        self._samples = 0  # outstanding
        self._fewer = asyncio.Event()

    async def start(self) -> ModelFacts:
        """Connect: the model that is served. Raises ``Unavailable``."""
        self._fleet.start()
        if self._engine is not None:
            self._watching = asyncio.create_task(self._end_with(self._engine))
        self._facts = await self._fleet.model(None)
        return self._facts

    async def stop(self) -> None:
        """End what runs, with an error, and wait until whoever asked was told."""
        self._closing.set()
        if self._watching is not None:
            self._watching.cancel()
        await self._fleet.stop()
        await asyncio.gather(*self._asked, return_exceptions=True)
        self.text.stop()

    async def _end_with(self, engine: Engine) -> None:
        """Nothing waits for an engine that is gone for good."""
        await engine.ended()
        self._fleet.fail_all(Unavailable(engine.trouble))

    async def generate(
        self, requests: Sequence[Request], on_done: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        """An output for each request, in their order. Raises ``InvalidRequest`` for wrong parameters, ``Unavailable``
        after ``stop``; what is wrong with one prompt is in its output."""
        facts = self._check_open()
        if (task := asyncio.current_task()) is not None:
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        known = await check(self.text, facts, requests)
        outputs: list[RequestOutput] = [RequestOutput(request.shown, []) for request in requests]
        repeats: Counter[tuple[int, bytes]] = Counter()

        async def answer(place: int, prepared: Prepared) -> None:
            try:
                outputs[place] = await self._persistently(prepared)
            except TokaError as error:
                told = prepared.in_own_words(error)
                outputs[place] = replace(outputs[place], prompt_token_ids=prepared.prompt_ids, error=told)
            finally:
                self._samples -= prepared.samples
                self._fewer.set()
            on_done(outputs[place])

        async with asyncio.TaskGroup() as group:
            for first in range(0, len(requests), AT_ONCE):
                some = requests[first : first + AT_ONCE]
                ready: list[Prepared | TokaError] = [_closed()] * len(some)
                if not self._closing.is_set():
                    ready = await prepare(self.text, facts, some, known, repeats)
                for place, prepared in enumerate(ready, first):
                    if isinstance(prepared, TokaError):
                        outputs[place] = replace(outputs[place], error=prepared)
                        on_done(outputs[place])
                    else:
                        await self._room(prepared.samples)
                        group.create_task(answer(place, prepared))
        return outputs

    async def stream(self, request: Request) -> AsyncGenerator[list[StreamOutput], None]:
        """What is new, of any sample, as it comes; a full queue is waited for. Raises ``TokaError``."""
        facts = self._check_open()
        known = await check(self.text, facts, [request])
        [prepared] = await prepare(self.text, facts, [request], known, Counter())
        if isinstance(prepared, TokaError):
            raise prepared
        try:
            generation = await self._accepted(prepared)
        except InvalidRequest as error:
            raise prepared.in_own_words(error) from None
        try:
            transcripts: dict[int, Transcript] = {}
            ended: set[int] = set()
            while news := await generation.wait_updated():
                some = [choice for choice in news if choice.index not in ended]
                ended |= {choice.index for choice in some if choice.ending is not None}
                yield [self._news(prepared, choice, transcripts) for choice in some]
        except InvalidRequest as error:
            raise prepared.in_own_words(error) from None
        finally:
            generation.close()

    async def _accepted(self, prepared: Prepared) -> ActiveRequest:
        """A stream that a scheduler has in its queue."""
        pause = _FIRST_PAUSE_S
        while True:
            generation = None
            try:
                generation = await self._submit(prepared, streaming=True)
                await generation.wait_accepted()
                return generation
            except BaseException as error:
                if generation is not None:
                    generation.close()
                if not isinstance(error, Overloaded):
                    raise
                wait = max(pause, error.retry_after_s)
            await self._pause(wait)
            pause = min(pause * 2, _LAST_PAUSE_S)

    async def _room(self, samples: int) -> None:
        """Until ``samples`` more may be outstanding; they are, then."""
        while self._samples and self._samples + samples > OUTSTANDING:
            self._fewer.clear()
            await self._fewer.wait()
        self._samples += samples

    async def _persistently(self, prepared: Prepared) -> RequestOutput:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await self._attempt(prepared)
            except Overloaded as error:
                wait = max(pause, error.retry_after_s)
            await self._pause(wait)
            pause = min(pause * 2, _LAST_PAUSE_S)

    async def _attempt(self, prepared: Prepared) -> RequestOutput:
        generation = await self._submit(prepared, streaming=False)
        try:
            while await generation.wait_ended():
                pass
            return self._output(prepared, generation)
        finally:
            generation.close()

    async def _submit(self, prepared: Prepared, *, streaming: bool) -> ActiveRequest:
        self._check_open()
        return await self._fleet.generate([prepared.job], streaming=streaming)

    async def _pause(self, seconds: float) -> None:
        """About so long, or until the end comes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.0)):
                await self._closing.wait()

    def _check_open(self) -> ModelFacts:
        """The model. Raises ``Unavailable`` before ``start`` and after ``stop``."""
        if self._closing.is_set() or self._facts is None:
            raise _closed()
        return self._facts

    def _output(self, prepared: Prepared, generation: ActiveRequest) -> RequestOutput:
        endings = [choice.outcome for choice in generation.samples]
        usage = Usage(
            endings[0].prompt_tokens,
            min(ending.cached_tokens for ending in endings),
            sum(ending.completion_tokens for ending in endings),
        )
        return RequestOutput(
            prepared.request.shown,
            prepared.prompt_ids,
            [self._completion(prepared, choice) for choice in generation.samples],
            usage,
            self._prompt_logprobs(prepared, generation),
        )

    def _completion(self, prepared: Prepared, choice: ActiveSample) -> CompletionOutput:
        token_ids = list(map(int, choice.new_ids))
        logprobs = choice.logprobs if prepared.job.settings.logprobs else None
        said, _ = choice.take()
        text = whole_text(prepared.vocabulary(self.text), said, choice.outcome)
        return CompletionOutput(choice.index, text, token_ids, logprobs, choice.outcome.reason)

    def _prompt_logprobs(self, prepared: Prepared, generation: ActiveRequest) -> list[dict[str, Any] | None] | None:
        top = prepared.job.settings.requested_prompt_logprobs
        if top is None:
            return None
        scores = generation.prompt_scores[0]
        start = prepared.job.settings.prompt_logprobs_start
        return prompt_logprobs(prepared.job.prompt_ids, scores, top, self.text.token_text, start)

    def _news(self, prepared: Prepared, choice: ActiveSample, transcripts: dict[int, Transcript]) -> StreamOutput:
        transcript = transcripts.get(choice.index)
        if transcript is None:
            stops = prepared.job.settings.stop_strings
            transcript = transcripts[choice.index] = Transcript(prepared.vocabulary(self.text), stops)
        token_ids = list(map(int, choice.new_ids))
        logprobs = choice.logprobs if prepared.job.settings.logprobs else None
        said, _ = choice.take()
        text, reason = transcript.push(said, []).text, None
        if choice.ending is not None:
            text, reason = text + transcript.finish(choice.ending).text, choice.ending.reason
        return StreamOutput(choice.index, text, token_ids, logprobs, reason)


def _closed() -> Unavailable:
    return Unavailable("this LLM is being closed; make another one")
