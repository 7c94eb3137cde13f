"""The status with which a gRPC call ends or begins."""

import contextlib

import grpc

_UNARY = (grpc.aio.UnaryUnaryCall, grpc.aio.StreamUnaryCall)  # calls with one response


async def ends(call: grpc.aio.Call) -> grpc.StatusCode:
    """Read ``call`` to its end, and return its status."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while not isinstance(call, _UNARY) and await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def begins(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """Return OK as soon as ``call`` gives a message, else its status."""
    try:
        return grpc.StatusCode.OK if await call.read() is not grpc.aio.EOF else await call.code()
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
