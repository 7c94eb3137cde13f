"""Runs requests over one session with each scheduler: a gateway without HTTP."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from services.client.engine import EngineProcess
from services.client.outputs import CompletionOutput, RequestOutput, StreamOutput, Usage
from services.client.request import ClientRequest, PreparedRequest, check, prepare
from services.common.boundaries import undo_on_error
from services.common.config import GatewayConfig
from services.common.errors import InvalidRequest, Overloaded, TokaError, Unavailable
from services.common.rpc.channel import PLAIN, Dialer
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.active_request import ActiveRequest, ActiveSample
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.session import Timings
from services.gateway.engine.text import TextEngine
from services.gateway.openai.compiler import RequestCompiler
from services.gateway.openai.logprobs import prompt_logprobs
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.openai.transcript import Transcript, whole_text

R = TypeVar("R")

# Maximum number of samples at the schedulers: far more than run at once, far fewer than fill their queues.
OUTSTANDING = 16_384
# Timeout for the first scheduler to be ready.
CONNECT_S = 30.0
# Number of prompts that are encoded together.
AT_ONCE = 1024
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0
PARSERS = {"tool_call_parser": "auto", "reasoning_parser": "auto"}  # flags for the formats of answers


class RequestRunner:
    """Runs requests. Its methods run on one event loop.

    ``patience_s``: seconds that a prompt waits for a scheduler that is not reachable.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tokenizer: Tokenizer,
        engine: EngineProcess | None,
        *,
        patience_s: float,
        dialer: Dialer = PLAIN,
        parsers: Mapping[str, str] = PARSERS,
    ) -> None:
        self.text = TextEngine(tokenizer)
        self._formats = OutputFormats.of(GatewayConfig.model_validate(parsers), tokenizer)
        self._engine = engine
        self._fleet = Fleet(
            addresses,
            tokenizer_fingerprint=tokenizer.fingerprint,
            metrics=RequestMetrics(),
            timings=Timings(wait_for_ready=CONNECT_S, failover=patience_s),
            dialer=dialer,
        )
        self._compiler: RequestCompiler | None = None  # None until a scheduler is known
        self._closing = asyncio.Event()
        self._asked: set[asyncio.Task[Any]] = set()  # tasks that run ``generate``
        self._watching: asyncio.Task[None] | None = None
        self._samples = 0  # outstanding
        self._fewer = asyncio.Event()

    async def start(self) -> ModelFacts:
        """Connect, and return the facts of the served model. Raises Unavailable."""
        self._fleet.start()
        if self._engine is not None:
            self._watching = asyncio.create_task(self._end_with(self._engine))
        facts = await self._fleet.model(None)
        self._compiler = RequestCompiler(self.text, self._formats, facts, reads_calls=False)
        return facts

    async def stop(self) -> None:
        """End all requests with an error, and wait until their callers have it."""
        self._closing.set()
        if self._watching is not None:
            self._watching.cancel()
        await self._fleet.stop()
        await asyncio.gather(*self._asked, return_exceptions=True)
        self.text.stop()

    async def _end_with(self, engine: EngineProcess) -> None:
        """Fail all requests when ``engine`` has ended."""
        await engine.ended()
        self._fleet.fail_all(Unavailable(engine.trouble))

    async def generate(
        self, requests: Sequence[ClientRequest], on_done: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        """Return an output for each request, in order. The error of a prompt is in its output.

        Raises InvalidRequest for wrong parameters, and Unavailable after ``stop``.
        """
        compiler = self._check_open()
        if (task := asyncio.current_task()) is not None:
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        drafts = await check(compiler, requests)
        outputs: list[RequestOutput] = [RequestOutput(request.shown, []) for request in requests]
        repeats: Counter[tuple[int, bytes]] = Counter()

        async def answer(index: int, prepared: PreparedRequest) -> None:
            try:
                outputs[index] = await self._retried(self._answered, prepared)
            except TokaError as error:
                explained = prepared.explain(error)
                outputs[index] = replace(outputs[index], prompt_token_ids=prepared.prompt_ids, error=explained)
            finally:
                self._samples -= prepared.samples
                self._fewer.set()
            on_done(outputs[index])

        async with asyncio.TaskGroup() as group:
            for first in range(0, len(requests), AT_ONCE):
                some = requests[first : first + AT_ONCE]
                ready: list[PreparedRequest | TokaError] = [_closed()] * len(some)
                if not self._closing.is_set():
                    ready = await prepare(compiler, some, drafts, repeats)
                for index, prepared in enumerate(ready, first):
                    if isinstance(prepared, TokaError):
                        outputs[index] = replace(outputs[index], error=prepared)
                        on_done(outputs[index])
                    else:
                        await self._room(prepared.samples)
                        group.create_task(answer(index, prepared))
        return outputs

    async def stream(self, request: ClientRequest) -> AsyncGenerator[list[StreamOutput], None]:
        """Yield the new parts of samples when they arrive. Waits while the queue is full. Raises TokaError."""
        compiler = self._check_open()
        drafts = await check(compiler, [request])
        [prepared] = await prepare(compiler, [request], drafts, Counter())
        if isinstance(prepared, TokaError):
            raise prepared
        try:
            active = await self._retried(self._accepted, prepared)
        except InvalidRequest as error:
            raise prepared.explain(error) from None
        try:
            transcripts: dict[int, Transcript] = {}
            ended: set[int] = set()
            while updated := await active.wait_updated():
                some = [choice for choice in updated if choice.index not in ended]
                ended |= {choice.index for choice in some if choice.ending is not None}
                yield [self._stream_output(prepared, choice, transcripts) for choice in some]
        except InvalidRequest as error:
            raise prepared.explain(error) from None
        finally:
            active.close()

    async def _accepted(self, prepared: PreparedRequest) -> ActiveRequest:
        """Return a streaming request that a scheduler has accepted."""
        active = await self._submit(prepared, streaming=True)
        with undo_on_error(active.close):
            await active.wait_accepted()
        return active

    async def _room(self, samples: int) -> None:
        """Wait until ``samples`` more may be outstanding, and count them."""
        while self._samples and self._samples + samples > OUTSTANDING:
            self._fewer.clear()
            await self._fewer.wait()
        self._samples += samples

    async def _retried(self, attempt: Callable[[PreparedRequest], Awaitable[R]], prepared: PreparedRequest) -> R:
        """Return the result of ``attempt``, which is repeated while the schedulers are overloaded."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await attempt(prepared)
            except Overloaded as error:
                wait = max(pause, error.retry_after_s)
            await self._pause(wait)
            pause = min(pause * 2, _LAST_PAUSE_S)

    async def _answered(self, prepared: PreparedRequest) -> RequestOutput:
        """Return the output of a request when it has ended."""
        active = await self._submit(prepared, streaming=False)
        try:
            while await active.wait_ended():
                pass
            return self._output(prepared, active)
        finally:
            active.close()

    async def _submit(self, prepared: PreparedRequest, *, streaming: bool) -> ActiveRequest:
        self._check_open()
        return await self._fleet.generate([prepared.prompt], streaming=streaming)

    async def _pause(self, seconds: float) -> None:
        """Wait for about ``seconds``, or until ``stop``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.0)):
                await self._closing.wait()

    def _check_open(self) -> RequestCompiler:
        """Return the compiler. Raises Unavailable before ``start`` and after ``stop``."""
        if self._closing.is_set() or self._compiler is None:
            raise _closed()
        return self._compiler

    def _output(self, prepared: PreparedRequest, active: ActiveRequest) -> RequestOutput:
        endings = [choice.outcome for choice in active.samples]
        usage = Usage(
            endings[0].prompt_tokens,
            min(ending.cached_tokens for ending in endings),
            sum(ending.completion_tokens for ending in endings),
        )
        return RequestOutput(
            prepared.request.shown,
            prepared.prompt_ids,
            [self._completion(prepared, choice) for choice in active.samples],
            usage,
            self._prompt_logprobs(prepared, active),
        )

    def _completion(self, prepared: PreparedRequest, choice: ActiveSample) -> CompletionOutput:
        token_ids = list(map(int, choice.new_ids))
        logprobs = choice.logprobs if prepared.prompt.settings.logprobs else None
        ids, _ = choice.take()
        text = whole_text(prepared.vocabulary(self.text), ids, choice.outcome)
        return CompletionOutput(choice.index, text, token_ids, logprobs, choice.outcome.reason)

    def _prompt_logprobs(self, prepared: PreparedRequest, active: ActiveRequest) -> list[dict[str, Any] | None] | None:
        top = prepared.prompt.settings.requested_prompt_logprobs
        if top is None:
            return None
        scores = active.prompt_scores[0]
        start = prepared.prompt.settings.prompt_logprobs_start
        return prompt_logprobs(prepared.prompt.prompt_ids, scores, top, self.text.token_text, start)

    def _stream_output(
        self, prepared: PreparedRequest, choice: ActiveSample, transcripts: dict[int, Transcript]
    ) -> StreamOutput:
        transcript = transcripts.get(choice.index)
        if transcript is None:
            stops = prepared.prompt.settings.stop_strings
            transcript = transcripts[choice.index] = Transcript(prepared.vocabulary(self.text), stops)
        token_ids = list(map(int, choice.new_ids))
        logprobs = choice.logprobs if prepared.prompt.settings.logprobs else None
        ids, _ = choice.take()
        text, reason = transcript.push(ids, []).text, None
        if choice.ending is not None:
            text, reason = text + transcript.finish(choice.ending).text, choice.ending.reason
        return StreamOutput(choice.index, text, token_ids, logprobs, reason)


def _closed() -> Unavailable:
    return Unavailable("this LLM is being closed; make another one")
