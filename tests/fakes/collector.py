"""An OpenTelemetry collector that keeps what it gets: a real gRPC server with the contract's own stub."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class Span:
    """As it came."""

    def __init__(self, service: str, span: trace_pb2.Span) -> None:
        self.service, self.name = service, span.name
        self.id, self.parent = span.span_id.hex(), span.parent_span_id.hex()
        self.start, self.end = span.start_time_unix_nano, span.end_time_unix_nano
        self.failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        self.attributes = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """``traces``: spans by their trace's id. Safe to share between threads."""

    url = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[str, list[Span]] = defaultdict(list)

    def Export(self, request, context):
        with self._lock:
            for resource in request.resource_spans:
                facts = {each.key: each.value.string_value for each in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    self._traces[span.trace_id.hex()].append(Span(facts["service.name"], span))
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def traces(self) -> dict[str, list[Span]]:
        with self._lock:
            return {trace: list(spans) for trace, spans in self._traces.items()}


@contextmanager
def collecting() -> Iterator[Collector]:
    """One that listens on a port of its own."""
    server = grpc.server(ThreadPoolExecutor(4))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
