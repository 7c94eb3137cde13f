"""The asyncio gRPC server of the services: options, error mapping, health, reflection, and shutdown."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.rpc.acceptor import accepting_server
from services.common.rpc.certificates import Certificates
from services.common.rpc.channel import MAX_MESSAGE_BYTES, MOST_CALLS, server_options
from services.common.rpc.health import WatchedHealth
from services.common.rpc.interceptor import ErrorInterceptor
from services.common.rpc.port import bind

_MOST_WATCHERS = 256  # health watches


class RpcServer:
    """Server of one public service beside health and reflection, on the process's event loop.

    Health is NOT_SERVING, overall ("") and for the service, until ``set_ready(True)``. The owner decides when it is
    ready; an open port alone is not enough.
    """

    def __init__(
        self,
        service_name: str,
        *,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        certificates: Certificates | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """Create a server that does not listen yet. ``interceptors`` may raise the same exceptions as servicers."""
        self._certificates = certificates
        options = server_options(max_receive_bytes)
        self._server = accepting_server((ErrorInterceptor(), *interceptors), options, most_calls=MOST_CALLS)
        self._names = ("", service_name)
        self._health = WatchedHealth(_MOST_WATCHERS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)

    @property
    def grpc_server(self) -> grpc.aio.Server:
        """The server to pass to the generated ``add_...Servicer_to_server``."""
        return self._server

    async def start(self, address: str) -> str:
        """Listen on ``address`` (``host:port`` or ``unix:path``; port 0 is any free port). Return the actual address.

        Raises ``Unavailable`` if the address cannot be bound.
        """
        await self.set_ready(False)
        real = bind(self._server, address, self._certificates)
        await self._server.start()
        return real

    async def set_ready(self, ready: bool) -> None:
        """Set the status that grpc.health.v1 reports."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def check(self) -> None:
        """Raise the exception that ended the serving loop, if any. The server accepts no call after it."""
        await self._server.wait_for_termination(0)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
