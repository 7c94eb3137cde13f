"""Maps whatever a servicer raises to a status, for every server of ours.

A ``TokaError`` becomes its status with details. Anything else is logged with its traceback and leaves as INTERNAL
without its text, which may hold a user's data.
"""

import asyncio
import functools
from collections.abc import Callable

import grpc
import structlog
from grpc_status import rpc_status

from services.common import errors
from services.common.rpc.status import to_status

log = structlog.get_logger(__name__)

# By whether requests and whether answers are streamed.
_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """For servicers written as coroutines (unary answers) and async generators (streamed answers)."""

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        return guarded_handler(handler, handler_call_details.method, _guard_unary, _guard_stream)


def guarded_handler(
    handler: grpc.RpcMethodHandler | None, method: str, unary: Callable, stream: Callable
) -> grpc.RpcMethodHandler | None:
    """``handler``, None = there is none, with its behavior inside ``unary`` or ``stream``, by how it answers; either
    is called with behavior and ``method``."""
    if handler is None:
        return None
    if handler.response_streaming:
        behavior = stream(handler.unary_stream or handler.stream_stream, method)
    else:
        behavior = unary(handler.unary_unary or handler.stream_unary, method)
    make = _HANDLERS[handler.request_streaming, handler.response_streaming]
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _guard_unary(behavior, method: str):
    @functools.wraps(behavior)
    async def guarded(request, context):
        try:
            return await behavior(request, context)
        except Exception as error:
            await _abort(context, error, method)

    return guarded


def _guard_stream(behavior, method: str):
    @functools.wraps(behavior)
    async def guarded(request, context):
        try:
            answers = behavior(request, context)
            if not hasattr(answers, "__aiter__"):  # reflection and health come as plain coroutines or iterators
                await answers
                return
            async for answer in answers:
                yield answer
        except Exception as error:
            await _abort(context, error, method)

    return guarded


async def _abort(context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
    if isinstance(error, (asyncio.CancelledError, grpc.aio.AbortError)):
        raise error
    status = status_of(error, method)
    context.set_trailing_metadata(status.trailing_metadata)
    await context.abort(status.code, status.details)


def status_of(error: Exception, method: str) -> grpc.Status:
    """What a client is told of ``error``, which ended a call of ``method``."""
    if not isinstance(error, errors.TokaError):
        log.error("rpc failed", method=method, exc_info=error)
        error = errors.Internal("internal error; the server's log has the details")
    return rpc_status.to_status(to_status(error))
