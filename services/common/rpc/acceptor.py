"""An asyncio gRPC server that accepts calls after a method name that is not UTF-8.

The serving loop of ``grpc.aio`` decodes the path of each call to a method that is not registered. A path that is not
UTF-8 ends the loop with ``UnicodeDecodeError``, and the server accepts no call from then on (grpcio 1.85). This server
routes all calls to unregistered methods to one registered method, which returns UNIMPLEMENTED, so their paths are not
decoded.

It also keeps one message of grpcio out of the logs: an error with a traceback for each answer to a client that has
disconnected a moment before.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server

_UNKNOWN = "/tokasaurus.common.Unknown/Method"


class GrpcAcceptor(cygrpc.AioServer):  # type: ignore[misc]
    """Serving loop that overrides a private method of grpcio.

    ``tests/common/rpc/test_server.py`` fails if a release of grpcio no longer calls the method.
    """

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        """Return a future of the next call to the registered ``method``.

        None stands for all other methods. Its future never completes, because ``_UNKNOWN`` accepts these calls.
        """
        loop = asyncio.get_running_loop()
        if method is None:
            return loop.create_future()
        if method == _UNKNOWN.encode():
            return loop.create_task(self._request_call())
        return loop.create_task(self._request_registered_call(method))


def accepting_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, int]],
    most_calls: int | None = None,
) -> grpc.aio.Server:
    """Return a server that uses ``GrpcAcceptor``. The running event loop owns it.

    At most ``most_calls`` run at once, and further calls get RESOURCE_EXHAUSTED. None means no limit.
    """
    logging.getLogger(cygrpc.__name__).addFilter(_is_unforeseen)  # added once, however often this is called
    server: Any = _AcceptingServer(interceptors, options, most_calls)
    return cast(grpc.aio.Server, server)


class _AcceptingServer(_server.Server):
    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, int]],
        most_calls: int | None,
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = GrpcAcceptor(self._loop, None, (), tuple(interceptors), tuple(options), most_calls)
        unknown: Any = grpc.stream_stream_rpc_method_handler(_refuse)
        self._server.add_registered_method_handlers({_UNKNOWN: unknown})


def _is_unforeseen(record: logging.LogRecord) -> bool:
    """Return whether to log ``record``. The operations of a call fail as a batch if its connection is closed."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, cygrpc.ExecuteBatchError)


async def _refuse(
    requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield b""
