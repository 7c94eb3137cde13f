"""Converts exceptions of servicers to gRPC statuses.

A ``TokaError`` becomes a status with details. Any other exception is logged with its traceback and becomes INTERNAL
without its text, which may contain a user's data.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors
from services.common.rpc.status import to_status

log = structlog.get_logger(__name__)

# The types of requests and responses are unknown here.
Behavior: TypeAlias = Callable[..., Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Details: TypeAlias = grpc.HandlerCallDetails
AnyContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# by (requests are streamed, responses are streamed)
_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor for servicers written as coroutines (unary responses) and async generators (streamed responses)."""

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable["Handler | None"]], handler_call_details: Details
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        return guarded_handler(handler, handler_call_details.method, _guard_unary, _guard_stream)


def guarded_handler(
    handler: "Handler | None",
    method: str,
    unary: Callable[[Behavior, str], Behavior],
    stream: Callable[[Behavior, str], Behavior],
) -> "Handler | None":
    """Return ``handler`` with its behavior wrapped by ``unary`` or ``stream``, whichever fits its response.

    Both are called with the behavior and ``method``. Returns None if ``handler`` is None.
    """
    if handler is None:
        return None
    behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    guard = stream if handler.response_streaming else unary
    make = _HANDLERS[handler.request_streaming, handler.response_streaming]
    return make(guard(_with_parsing(handler, behavior), method), None, handler.response_serializer)


def _with_parsing(handler: Handler, behavior: Behavior) -> Behavior:
    """Return a behavior that parses the bytes of requests. gRPC itself would return UNKNOWN for invalid bytes."""
    if (deserialize := handler.request_deserializer) is None:
        return behavior

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise errors.InvalidRequest(f"the message cannot be read: {error}") from None

    async def read_all(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield read(data)

    @functools.wraps(behavior)
    def reading(request: Any, context: Any) -> Any:
        if not handler.request_streaming:
            return behavior(read(request), context)
        return behavior(read_all(request) if hasattr(request, "__aiter__") else map(read, request), context)

    return reading


def _guard_unary(behavior: Behavior, method: str) -> Behavior:
    @functools.wraps(behavior)
    async def guarded(request: Any, context: AnyContext) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            await abort(context, error, method)

    return guarded


def _guard_stream(behavior: Behavior, method: str) -> Behavior:
    @functools.wraps(behavior)
    async def guarded(request: Any, context: AnyContext) -> AsyncIterator[Any]:
        try:
            responses = behavior(request, context)
            if not hasattr(responses, "__aiter__"):  # reflection and health return plain coroutines or iterators
                await responses
                return
            async for response in responses:
                yield response
        except Exception as error:
            await abort(context, error, method)

    return guarded


async def abort(context: AnyContext, error: Exception, method: str) -> NoReturn:
    """End a call of ``method`` with the status of ``error``."""
    if isinstance(error, (asyncio.CancelledError, grpc.aio.AbortError)):
        raise error
    status = status_of(error, method)
    context.set_trailing_metadata(status.trailing_metadata)
    await context.abort(status.code, status.details)


def status_of(error: Exception, method: str) -> grpc.Status:
    """Return the status for ``error``, an exception of ``method``."""
    if isinstance(error, NotImplementedError):  # a method without an implementation, such as Health.List
        return rpc_status.to_status(status_pb2.Status(code=code_pb2.UNIMPLEMENTED, message="not served here"))
    if not isinstance(error, errors.TokaError):
        log.error("rpc failed", method=method, exc_info=error)
        error = errors.Internal.logged()
    return rpc_status.to_status(to_status(error))
