"""Serves a Generate call: one request, one stream, text in and out."""

import time
from collections.abc import AsyncGenerator

import numpy as np
import structlog

from services.common.boundaries import errors_as_internal
from services.common.packed import fill
from services.common.process.tracing import HEADER
from services.common.rpc.interceptor import AnyContext
from services.common.text.detokenizer import Detokenizer
from services.scheduler.api.encoding import encode_accepted, encode_finish, encode_scored, fill_top
from services.scheduler.api.hub import Hub
from services.scheduler.api.model import ServedModel
from services.scheduler.api.prompt import is_text
from services.scheduler.api.resume import finish_of
from services.scheduler.api.spending import Spending
from services.scheduler.api.traces import Traces
from services.scheduler.api.validation import read_message
from services.scheduler.core.output import Delta
from services.scheduler.core.request import Finish
from services.scheduler.engine.events import Accepted, Rejected
from services.scheduler.grammar.checker import GrammarChecker
from services.scheduler.grammar.message import name_of
from tokasaurus.scheduler.v1 import generate_pb2

log = structlog.get_logger(__name__)


class GenerateCall:
    """State of one Generate call. Used on the event loop. A sample's handle is its number."""

    def __init__(self, hub: Hub, model: ServedModel, grammar_checker: GrammarChecker, spending: Spending) -> None:
        self._hub = hub
        self._model = model
        self._grammar_checker = grammar_checker
        self._spending = spending
        self._texts: dict[int, Detokenizer] = {}
        self._wants_logprobs = False
        self._include_stop = False
        self._stops: list[bytes] = []
        self._traces = Traces(hub.tracing)

    async def run(
        self, message: generate_pb2.GenerateRequest, context: AnyContext
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Yield the acceptance, then outputs until every sample has finished. Raises the error of a refused request."""
        model = self._model
        request = await read_message(message, model)
        request.deadline_ms = _earlier(request.deadline_ms, context.time_remaining())
        aborted = False
        if request.sampling.grammar:
            name = name_of(message.sampling.grammar)
            aborted = await self._hub.unchecked.check(self._grammar_checker, request, name)
        self._wants_logprobs = request.sampling.logprobs
        finish = finish_of(request, model)
        wants_text = message.output.text if message.output.HasField("text") else is_text(message)
        if wants_text:
            self._include_stop = message.output.include_stop
            self._stops = [stop.encode() for stop in message.stopping.strings]
            vocabulary = model.tokenizer.vocabulary
            if message.output.special_tokens:
                vocabulary = vocabulary.with_specials
            self._texts = {index: Detokenizer(vocabulary, message.stopping.strings) for index in range(request.n)}
            if request.resumed_tokens:  # sent before, but text withheld then may be sent now
                generated = request.tokens[request.prompt_tokens :].tolist()
                at_stop_token = finish is not None and finish.stop_token_id is not None
                for token in generated[:-1] if at_stop_token and not self._include_stop else generated:
                    self._texts[0].push([token])
        if finish is not None:
            yield generate_pb2.GenerateResponse(accepted=encode_accepted(request))
            yield generate_pb2.GenerateResponse(outputs=self._outputs(Delta(0, finished=[finish])))
            return
        self._spending.reserve(request.prompt_tokens, request.n, request.max_tokens)
        request.traceparent = request.traceparent or _traceparent(context)
        if self._hub.tracing is not None:
            request.traceparent = self._hub.tracing.of_client(request.traceparent)
        request.sink, mailbox = self._hub.open(session=False)
        self._traces.begin(request)
        try:
            self._hub.engine.submit(request, aborted=aborted)
            unfinished = request.n
            while unfinished:
                item = await mailbox.get()
                match item:
                    case Rejected(error=error):
                        self._traces.rejected(request.handle, error)
                        self._spending.give_back()
                        raise error
                    case Accepted():
                        yield generate_pb2.GenerateResponse(accepted=encode_accepted(request))
                    case Delta():
                        unfinished -= len(item.finished)
                        self._traces.finished(item.finished)
                        self._spending.finished(item.finished, unfinished)
                        yield self._response(item, request.request_id)
        finally:
            self._hub.close(request.sink)
            self._spending.close(request.resumed_tokens + mailbox.tokens)
            self._traces.close()

    def _response(self, delta: Delta, request_id: str) -> generate_pb2.GenerateResponse:
        with errors_as_internal(log, "an output could not be encoded", request_id=request_id):
            return generate_pb2.GenerateResponse(outputs=self._outputs(delta))

    def _outputs(self, delta: Delta) -> generate_pb2.SampleOutputs:
        finished = {finish.handle: finish for finish in delta.finished}
        counts = np.ones(len(delta.handles), np.int64) if delta.counts is None else delta.counts
        ends = np.cumsum(counts)
        message = generate_pb2.SampleOutputs(weights_version=delta.weights_version)
        for handle, scored in delta.scored:
            sample = message.samples.add(sample_index=handle)
            encode_scored(sample.prompt_logprobs.add(), scored)
        for handle, start, experts in [] if delta.routed is None else delta.routed.pieces():
            message.samples.add(sample_index=handle).routed_experts.add(start=start, experts=experts.tobytes())
        for index, end, count in zip(delta.handles.tolist(), ends.tolist(), counts.tolist(), strict=True):
            self._add(message.samples.add(), delta, index, slice(end - count, end), finished.pop(index, None))
        for index, finish in finished.items():
            self._add(message.samples.add(), delta, index, slice(0), finish)
        return message

    def _add(
        self, sample: generate_pb2.SampleOutput, delta: Delta, index: int, rows: slice, finish: Finish | None
    ) -> None:
        sample.sample_index = index
        tokens = delta.tokens[rows]
        fill(sample, "token_ids", tokens)
        if (text := self._texts.get(index)) is not None:
            sample.text = self._text(text, tokens.tolist(), finish)
        if self._wants_logprobs and len(tokens):
            _add_logprobs(sample.logprobs, delta, rows)
        if finish is not None:
            sample.finish.CopyFrom(encode_finish(finish))

    def _text(self, text: Detokenizer, tokens: list[int], finish: Finish | None) -> str:
        if finish is None:
            return text.push(tokens)
        if finish.stop_token_id is not None and not self._include_stop:
            tokens = tokens[:-1]  # its text is not part of the answer
        index, trailing = finish.stop_string or (0, 0)
        if trailing and self._include_stop:
            trailing -= len(self._stops[index])
        return (text.push(tokens) if tokens else "") + text.finish(trailing)


def _add_logprobs(message: generate_pb2.Logprobs, delta: Delta, rows: slice) -> None:
    fill(message, "chosen", delta.logprobs[rows])
    if delta.top is not None:
        fill_top(message, delta.top[rows])


def _traceparent(context: AnyContext) -> str:
    """Return the caller's traceparent in the call's metadata, or an empty string."""
    values = (value for name, value in context.invocation_metadata() or () if name == HEADER)
    return str(next(values, ""))


def _earlier(deadline_ms: int | None, remaining_s: float | None) -> int | None:
    """Return the earlier of the request's deadline and the call's."""
    if remaining_s is None:
        return deadline_ms
    call_ms = int((time.monotonic() + remaining_s) * 1000)
    return call_ms if deadline_ms is None else min(deadline_ms, call_ms)
