"""Sends one stream of messages to several servers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from services.common.errors import TokaError
from services.common.rpc.channel import task_is_cancelled

ToError = Callable[[str, Exception], TokaError]


async def send_to_all(
    calls: Mapping[str, "grpc.aio.StreamUnaryCall[Any, Any]"], messages: AsyncIterator[Any], to_error: ToError
) -> list[Any]:
    """Send each message to all ``calls``. Return the response or the error of each call, in their order.

    ``calls`` has the address of each server as its key. The next message is read when every call has taken the previous
    one, so few messages are in memory. Servers must read all messages before they end a call with an error. If a call
    ends earlier, its error is raised. Then, and if this task is cancelled, all calls are cancelled.

    ``to_error`` makes the error from the address and the exception of a call: a ``grpc.RpcError``, or another exception
    if the connection has ended.
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
    """A call that receives all messages."""

    def __init__(self, address: str, call: "grpc.aio.StreamUnaryCall[Any, Any]", to_error: ToError) -> None:
        self._address, self._call, self._to_error = address, call, to_error

    async def write(self, message: Any) -> None:
        """Send ``message`` when the server has room for it."""
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:  # the call has ended; its status has the reason
            await self.finish()
        except grpc.RpcError as error:
            # gRPC reports INTERNAL instead of UNAVAILABLE if the connection has ended.
            lost = error.code() is grpc.StatusCode.INTERNAL
            raise self._to_error(self._address, ConnectionError() if lost else error) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise self._failure(error) from error

    async def result(self) -> Any:
        """Send no more messages, and return the response or the error."""
        try:
            return await self.finish()
        except TokaError as error:
            return error

    async def finish(self) -> Any:
        """Send no more messages, and return the response. Raises the error of the call."""
        try:
            if not self._call.done():
                await self._call.done_writing()
            return await self._call
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Any) -> BaseException:
        """Return the error of the call, or ``error`` itself if this task was cancelled."""
        if isinstance(error, asyncio.CancelledError) and task_is_cancelled():
            return error
        return self._to_error(self._address, error)
