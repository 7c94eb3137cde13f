"""The span of an HTTP request, from its headers to the end of its response."""

from types import TracebackType

from starlette.responses import Response
from starlette.types import Scope

from services.common.process.tracing import HEADER, Tracing, traceparent_of

# Scope key of a traced request: the W3C trace context that is the parent of spans in other services.
TRACEPARENT = "toka.traceparent"
# Scope key of every request: its id.
REQUEST_ID = "toka.request_id"


class RequestSpan:
    """Context manager for the span of a POST request. Owned by the request's task."""

    def __init__(self, tracing: Tracing, scope: Scope) -> None:
        self._tracing, self._scope = tracing, scope

    def __enter__(self) -> "RequestSpan":
        path = self._scope["path"]
        header = next((value for name, value in self._scope["headers"] if name == HEADER.encode()), b"")
        parent = self._tracing.of_client(header.decode("latin-1"))
        attributes = {"http.request.method": "POST", "http.route": path, "url.path": path}
        self._span = self._tracing.start(f"POST {path}", parent, "server", attributes)
        self._scope[TRACEPARENT] = traceparent_of(self._span)
        return self

    def answers(self, response: Response) -> None:
        """Record the status of the response, which is about to be sent."""
        self._span.set_attribute("http.response.status_code", response.status_code)
        if (request_id := self._scope.get(REQUEST_ID)) is not None:
            self._span.set_attribute("toka.request_id", request_id)
        if response.status_code >= 500:
            self._tracing.fail(self._span, str(response.status_code))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._tracing.fail(self._span, kind.__name__)
        self._span.end()
