"""Records spans of one stream's requests: queue, prefill and decode of samples, with the times of their finishes."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.errors import TokaError
from services.common.process.tracing import Tracing, traceparent_of
from services.scheduler.core.request import Finish, FinishReason, Request

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_MOST_SAMPLES = 16  # samples of a request with separate spans


class _Trace:
    """Trace of one request."""

    __slots__ = ("accepted", "began_ns", "first", "generated", "span", "tracing", "unfinished")

    def __init__(self, request: Request, tracing: Tracing, span: "Span", began_ns: int) -> None:
        self.tracing, self.span = tracing, span
        self.began_ns = began_ns  # since the epoch
        self.first = request.handle
        self.unfinished = request.n
        self.accepted = False
        self.generated = 0


class Traces:
    """Open traces of one stream, on the event loop. Without ``tracing`` it does nothing."""

    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing
        self._live: dict[int, _Trace] = {}  # by the handle of each sample

    def begin(self, request: Request) -> None:
        """Start the span of a request before it is queued. The request carries it to the worker."""
        if self._tracing is None:
            return
        handles = range(request.handle, request.handle + request.n)
        if not self._live.keys().isdisjoint(handles):  # the request will be rejected
            return
        attributes: dict[str, str | int] = {
            "toka.request_id": request.request_id,
            "toka.samples": request.n,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
        }
        began_ns = time.time_ns()
        span = self._tracing.start("request", request.traceparent, "server", attributes, start_ns=began_ns)
        if not span.is_recording():
            return
        request.traced = traceparent_of(span)
        trace = _Trace(request, self._tracing, span, began_ns)
        self._live |= dict.fromkeys(handles, trace)

    def accepted(self, request: Request) -> None:
        if (trace := self._live.get(request.handle)) is not None:
            trace.accepted = True

    def rejected(self, handle: int, error: TokaError) -> None:
        trace = self._live.get(handle)
        if trace is not None and not trace.accepted:
            for each in range(handle, handle + trace.unfinished):
                del self._live[each]
            trace.tracing.fail(trace.span, error.reason or type(error).__name__)
            trace.span.end()

    def finished(self, finishes: Sequence[Finish]) -> None:
        if not self._live:
            return
        for finish in finishes:
            if (trace := self._live.pop(finish.handle, None)) is not None:
                self._end(trace, finish)

    def close(self) -> None:
        """End the spans of unfinished requests as cancelled."""
        for trace in set(self._live.values()):
            trace.tracing.fail(trace.span, FinishReason.CANCELLED.name)
            trace.span.end()
        self._live.clear()

    def _end(self, trace: _Trace, finish: Finish) -> None:
        """Record the spans of a sample. After the last sample, end the request's span."""
        index = finish.handle - trace.first
        trace.unfinished -= 1
        trace.generated += finish.completion_tokens
        if index < _MOST_SAMPLES:
            at = trace.began_ns
            phases = (("queue", finish.queued_ns), ("prefill", finish.prefill_ns), ("decode", finish.decode_ns))
            for name, duration_ns in phases:
                span = trace.tracing.start(name, trace.span, attributes={"toka.sample": index}, start_ns=at)
                if name == "decode":
                    span.set_attribute("gen_ai.usage.output_tokens", finish.completion_tokens)
                    span.set_attribute("gen_ai.response.finish_reasons", [finish.reason.name.lower()])
                elif name == "prefill":
                    span.set_attribute("toka.cached_tokens", finish.cached_prompt_tokens)
                at += duration_ns
                span.end(at)
        if finish.reason in (FinishReason.ERROR, FinishReason.DEADLINE):
            trace.tracing.fail(trace.span, finish.reason.name)
        if not trace.unfinished:
            trace.span.set_attribute("gen_ai.usage.output_tokens", trace.generated)
            trace.span.end()
