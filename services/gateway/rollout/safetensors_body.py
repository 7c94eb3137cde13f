"""Reads a safetensors file from the body of a request while it arrives."""

import asyncio
from collections.abc import AsyncIterator

from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import StoredTensor, parse_header
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import control_pb2

CHUNK_BYTES = 1024 * 1024
_MOST_HEADER_BYTES = 8 * 1024 * 1024
_LENGTH_BYTES = 8
_MOST_CHARACTERS = 200  # in a message with an error of the parser


class SafetensorsBody:
    """The body of one request. At most one chunk and one received part of the body are in memory."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts
        self._buffer = bytearray()
        self.began = False  # true when a part was asked for

    async def messages(self, version: str) -> AsyncIterator[control_pb2.UploadWeightsRequest]:
        """Yield the messages of UploadWeights for the weights ``version``. Raises ``InvalidRequest``."""
        tensors = await self._read_header()
        header = control_pb2.UploadHeader(version=version)
        for name, stored in tensors.items():
            header.tensors.add(name=name, dtype=stored.dtype, shape=stored.shape)
        yield control_pb2.UploadWeightsRequest(header=header)
        for name, stored in tensors.items():
            for offset in range(0, stored.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, stored.nbytes - offset)
                if len(data := await self._take(size)) < size:
                    raise InvalidRequest(
                        f"{name}: the body ends after {offset + len(data)} of its {stored.nbytes} bytes; send all of"
                        " the file"
                    )
                yield control_pb2.UploadWeightsRequest(
                    chunk=weights_pb2.TensorChunk(name=name, offset=offset, data=data)
                )
        if await self._take(1):
            raise InvalidRequest("the body has bytes after the last tensor of its header; send one safetensors file")

    async def discard(self) -> None:
        """Read the rest of the body, because most clients read a response only after they have sent all of it."""
        async for _ in self._parts:
            pass

    async def _read_header(self) -> dict[str, StoredTensor]:
        length = int.from_bytes(first := await self._take(_LENGTH_BYTES), "little")
        if len(first) < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise _not_safetensors(f"it has no header of at most {_MOST_HEADER_BYTES} bytes")
        if len(header := await self._take(length)) < length:
            raise _not_safetensors(f"it ends after {len(header)} of the {length} bytes of its header")
        try:
            tensors, _ = await asyncio.to_thread(parse_header, header)
        except InvalidRequest as error:
            raise _not_safetensors(error.message) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_safetensors(f"its header is malformed: {error}"[:_MOST_CHARACTERS]) from error
        return tensors

    async def _take(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the body, or fewer at its end."""
        self.began = True
        while len(self._buffer) < size and (part := await anext(self._parts, None)) is not None:
            self._buffer += part
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def _not_safetensors(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a safetensors file: {reason}")
