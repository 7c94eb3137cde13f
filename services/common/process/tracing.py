"""Sends spans of requests to an OpenTelemetry collector. Without an endpoint it is off, and no SDK is loaded.

Services pass a trace on as W3C ``traceparent`` (Trace Context level 1, section 3.2): in HTTP headers, gRPC metadata,
``GenerateRequest`` and ``Admission``.
"""

import random
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import structlog

from services.common.config import ServiceFlags

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)

HEADER = "traceparent"
Attributes = Mapping[str, str | int | float | list[str]]
_CLOSE_S = 2.0  # limit for sending the remaining spans when the process exits
_SENT_EVERY_MS = 1000
_SEND_S = 5.0
_CLIENTS_A_SECOND = 50  # traces that clients may force to be recorded, per second


class Tracing:
    """Tracer of one process. Methods may be called by any thread and take some ten microseconds.

    A separate thread sends the spans. At most 2,048 spans wait for the collector; further spans are dropped.
    """

    def __init__(self, provider: "TracerProvider", sample_ratio: float) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tokasaurus")
        self._propagator = TraceContextTextMapPropagator()
        self._in_span = trace.set_span_in_context
        self._kinds = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._context_of = trace.get_current_span
        self._sample_ratio = sample_ratio
        self._second, self._clients = 0, 0  # the current second, and the traces forced in it

    @classmethod
    def of(cls, config: ServiceFlags, service: str, **facts: str | int) -> "Tracing | None":
        """Return a tracer for ``service``, or None if tracing is off.

        ``facts`` are further attributes of the process.
        """
        if not config.traces_to:
            return None
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        provider = TracerProvider(
            resource=Resource.create({"service.name": service, **facts}),
            sampler=ParentBasedTraceIdRatio(config.trace_sample_ratio),
            shutdown_on_exit=False,
        )
        endpoint = config.traces_to
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https:"), timeout=_SEND_S)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_SENT_EVERY_MS))
        log.info("tracing", endpoint=endpoint, sample_ratio=config.trace_sample_ratio)
        return cls(provider, config.trace_sample_ratio)

    def of_client(self, traceparent: str) -> str:
        """Return the traceparent to use for the ``traceparent`` of a client.

        A client may ask for its trace to be recorded. Beyond 50 such traces a second, ``trace_sample_ratio`` decides,
        as for other requests.
        """
        context = self._context_of(self._propagator.extract({HEADER: traceparent})).get_span_context()
        # The decision is not by trace id, since the client chooses it.
        if not context.trace_flags.sampled or random.random() < self._sample_ratio:
            return traceparent
        if self._second != (second := int(time.monotonic())):
            self._second, self._clients = second, 0
        self._clients += 1
        if self._clients <= _CLIENTS_A_SECOND:
            return traceparent
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-00"

    def start(
        self,
        name: str,
        parent: "str | Span",
        kind: Literal["server", "internal"] = "internal",
        attributes: Attributes | None = None,
        *,
        start_ns: int | None = None,
    ) -> "Span":
        """Start a span. The caller ends it with its ``end`` method.

        ``parent`` is a traceparent or a span of this process. An empty or malformed traceparent starts a new trace. The
        service that started the trace has decided whether it is recorded. ``start_ns`` is counted from the epoch; None
        is now.
        """
        context = self._propagator.extract({HEADER: parent}) if isinstance(parent, str) else self._in_span(parent)
        return self._tracer.start_span(name, context, self._kinds[kind], attributes, start_time=start_ns)

    def fail(self, span: "Span", reason: str) -> None:
        """Mark the span as failed for ``reason``."""
        span.set_status(self._error)
        span.set_attribute("error.type", reason)

    def close(self) -> None:
        """Send the remaining spans, at most for two seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="end of tracing", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def traceparent_of(span: "Span") -> str:
    """Return the traceparent with which another service continues the trace of ``span``."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
