"""A gRPC server like that of ``server``, with gRPC's blocking API.

It is for few streams of many small messages, which take half the time of an asyncio server. Each running call occupies
a thread.
"""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.boundaries import errors_to
from services.common.rpc.certificates import Certificates
from services.common.rpc.channel import MAX_MESSAGE_BYTES, server_options
from services.common.rpc.health import BlockingWatchedHealth
from services.common.rpc.interceptor import Behavior, Details, Handler, guarded_handler, status_of
from services.common.rpc.port import bind

# Running calls, including health watches. A further call is refused, because without a thread it would hang.
_MOST_CALLS = 64
_MOST_WATCHERS = 16  # health watches; the other threads stay free for the service


class BlockingRpcServer:
    """Server of one service beside health and reflection. Methods may be called by any thread.

    Health starts as NOT_SERVING, as in ``RpcServer``.
    """

    def __init__(
        self,
        service_name: str,
        *,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._server = grpc.server(
            ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="rpc"),
            interceptors=[_ErrorInterceptor()],
            options=server_options(max_receive_bytes),
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        self._names = ("", service_name)
        self._health = BlockingWatchedHealth(_MOST_WATCHERS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)

    @property
    def grpc_server(self) -> grpc.Server:
        """The server to pass to the generated ``add_...Servicer_to_server``."""
        return self._server

    def start(self, address: str) -> str:
        """Listen on ``address`` (``host:port`` or ``unix:path``; port 0 is any free port). Return the actual address.

        Raises ``Unavailable`` if the address cannot be bound.
        """
        self.set_ready(False)
        real = bind(self._server, address, self._certificates)
        self._server.start()
        return real

    def set_ready(self, ready: bool) -> None:
        """Set the status that grpc.health.v1 reports."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            self._health.set(name, status)

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cancel them and wait until they end."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()


class _ErrorInterceptor(grpc.ServerInterceptor):
    """Interceptor that converts exceptions of servicers to statuses."""

    def intercept_service(
        self, continuation: Callable[[Details], "Handler | None"], handler_call_details: Details
    ) -> "Handler | None":
        handler = continuation(handler_call_details)
        return guarded_handler(handler, handler_call_details.method, _guard_unary, _guard_stream)


def _guard_unary(behavior: Behavior, method: str) -> Behavior:
    @functools.wraps(behavior)
    def guarded(request: Any, context: grpc.ServicerContext) -> Any:
        with errors_to(functools.partial(_abort, context, method)):
            return behavior(request, context)

    return guarded


def _guard_stream(behavior: Behavior, method: str) -> Behavior:
    @functools.wraps(behavior)
    def guarded(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with errors_to(functools.partial(_abort, context, method)):
            yield from behavior(request, context)

    return guarded


def _abort(context: grpc.ServicerContext, method: str, error: Exception) -> None:
    if isinstance(error, grpc.RpcError):  # the client disconnected
        raise error
    context.abort_with_status(status_of(error, method))
