"""Maps whatever a servicer raises to a status, for every server of ours.

A ``TokaError`` becomes its status with details. Anything else is logged with its traceback and leaves as INTERNAL
without its text, which may hold a user's data.
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

# Of any method: which messages it takes and gives is not known here.
Behavior: TypeAlias = Callable[..., Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Details: TypeAlias = grpc.HandlerCallDetails
AnyContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# By whether requests and whether answers are streamed.
_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """For servicers written as coroutines (unary answers) and async generators (streamed answers)."""

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
    """``handler``, None = there is none, with its behavior inside ``unary`` or ``stream``, by how it answers; either
    is called with behavior and ``method``."""
    if handler is None:
        return None
    behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    guard = stream if handler.response_streaming else unary
    make = _HANDLERS[handler.request_streaming, handler.response_streaming]
    return make(guard(_reading(handler, behavior), method), None, handler.response_serializer)


def _reading(handler: Handler, behavior: Behavior) -> Behavior:
    """``behavior`` for requests that are still bytes. gRPC itself would answer UNKNOWN where they are no message."""
    if (deserialize := handler.request_deserializer) is None:
        return behavior

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise errors.InvalidRequest(f"a message that cannot be read: {error}") from None

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
            answers = behavior(request, context)
            if not hasattr(answers, "__aiter__"):  # reflection and health come as plain coroutines or iterators
                await answers
                return
            async for answer in answers:
                yield answer
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
    """What a client is told of ``error``, which ended a call of ``method``."""
    if isinstance(error, NotImplementedError):  # a method of the contract, such as Health.List, that nobody wrote
        return rpc_status.to_status(status_pb2.Status(code=code_pb2.UNIMPLEMENTED, message="not served here"))
    if not isinstance(error, errors.TokaError):
        log.error("rpc failed", method=method, exc_info=error)
        error = errors.Internal.logged()
    return rpc_status.to_status(to_status(error))
