"""Sends one stream of messages to several servers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from services.common.errors import TokaError

ToError = Callable[[str, Exception], TokaError]


async def send_to_all(
    calls: Mapping[str, "grpc.aio.StreamUnaryCall[Any, Any]"], messages: AsyncIterator[Any], to_error: ToError
) -> list[Any]:
    """Send each message to all ``calls``, which are by address. Return the response or the error of each, in order.

    The next message is read when every call has taken the one before, so few messages are in memory. Servers must read
    all messages before they end a call with an error. If a call ends before, its error is raised. Then, and if this
    task is cancelled, all calls are cancelled. ``to_error`` gets the address and the exception of a call: a
    ``grpc.RpcError``, or another one if the connection has ended.
    """
    streams = [_Stream(address, call, to_error) for address, call in calls.items()]
    try:
        async for message in messages:
            await asyncio.gather(*(stream.write(message) for stream in streams))
        return await asyncio.gather(*(stream.result() for stream in streams))
    finally:
        for call in calls.values():
            call.cancel()  # has no effect on a call that has ended


class _Stream:
    """A call that receives the messages."""

    def __init__(self, address: str, call: "grpc.aio.StreamUnaryCall[Any, Any]", to_error: ToError) -> None:
        self._address, self._call, self._to_error = address, call, to_error

    async def write(self, message: Any) -> None:
        """Send ``message`` when the server has room for it."""
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:  # the call has ended before; its status says why
            await self.finish()
        except grpc.RpcError as error:
            # gRPC replaces the status of a connection that has ended by INTERNAL.
            lost = error.code() is grpc.StatusCode.INTERNAL
            raise self._to_error(self._address, ConnectionError() if lost else error) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise self._failure(error) from error

    async def result(self) -> Any:
        """Send no more, and return the response or the error."""
        try:
            return await self.finish()
        except TokaError as error:
            return error

    async def finish(self) -> Any:
        """Send no more, and return the response."""
        try:
            if not self._call.done():
                await self._call.done_writing()
            return await self._call
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Any) -> BaseException:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            return error
        return self._to_error(self._address, error)
