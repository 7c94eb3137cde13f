"""The span of an HTTP request, from its headers to the end of its response."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import Scope

from services.common.process.tracing import HEADER, Tracing, traceparent_of

# Scope key of a traced request: the W3C trace context that is the parent of spans in other services.
TRACEPARENT = "toka.traceparent"
# Scope key of every request: its id.
REQUEST_ID = "toka.request_id"


@contextmanager
def request_span(tracing: Tracing, scope: Scope) -> Iterator[Callable[[Response], None]]:
    """Run the span of a POST request. Yield a function to call with the response, which is about to be sent."""
    path = scope["path"]
    header = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
    attributes = {"http.request.method": "POST", "http.route": path, "url.path": path}
    span = tracing.start(f"POST {path}", tracing.of_client(header.decode("latin-1")), "server", attributes)
    scope[TRACEPARENT] = traceparent_of(span)

    def answers(response: Response) -> None:
        span.set_attribute("http.response.status_code", response.status_code)
        if (request_id := scope.get(REQUEST_ID)) is not None:
            span.set_attribute("toka.request_id", request_id)
        if response.status_code >= 500:
            tracing.fail(span, str(response.status_code))

    try:
        yield answers
    except BaseException as error:
        tracing.fail(span, type(error).__name__)
        raise
    finally:
        span.end()
