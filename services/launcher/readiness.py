"""Waits until a child is ready."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.channel import PLAIN, Dialer
from services.launcher.deployment import ChildSpec

_RETRY_S = 0.1


async def wait_until_ready(spec: ChildSpec) -> None:
    """Return when the child is ready: by grpc.health.v1, or by ``/ready`` on the gateway's own socket.

    There is no timeout. The caller cancels it when the child exits.
    """
    if spec.handover is not None:
        await _http_ready(spec.handover.own_socket)
    else:
        await grpc_ready(spec.address, spec.dialer)


async def grpc_ready(address: str, dialer: Dialer = PLAIN) -> None:
    """Return when the server at ``address`` is SERVING."""
    async with dialer.open_aio(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stub lacks the methods
        while True:
            watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_RETRY_S)
            finally:
                watch.cancel()


async def _http_ready(own_socket: Path) -> None:
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(own_socket))) as client:
        while True:
            try:
                if (await client.get("http://gateway/ready")).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # it is not listening yet
            await asyncio.sleep(_RETRY_S)
