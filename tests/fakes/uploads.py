"""Uploads of weights to a fake worker, which keeps them in memory."""

from collections.abc import Awaitable, Callable

from services.common.boundaries import undo_on_error
from services.common.errors import InvalidRequest
from tokasaurus.worker.v1 import weights_pb2


class Upload:
    """An upload to the worker ``owner``, of one tensor "norm"."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.chunks: dict[int, bytes] = {}  # by offset

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks[offset] for offset in sorted(self.chunks))


class FakeUploads:
    """Base class of fake workers. Workers whose ``uploads`` are the same dict share a file system."""

    address: str

    def __init__(self) -> None:
        super().__init__()
        self.uploads: dict[str, Upload] = {}  # by update id
        self.on_chunk: Callable[[], Awaitable[object] | None] = lambda: None  # called before a chunk is written

    async def PrepareUpload(self, request, context):
        if needed := request.update_id not in self.uploads:
            self.uploads[request.update_id] = Upload(self.address)
        return weights_pb2.PrepareUploadResponse(needed=needed)

    async def UploadWeights(self, request_iterator, context):
        try:
            await self._receive(request_iterator)
        except InvalidRequest:
            async for _ in request_iterator:
                pass
            raise
        return weights_pb2.UploadWeightsResponse()

    async def _receive(self, request_iterator) -> None:
        header = (await anext(request_iterator)).header
        upload = self.uploads[header.update_id]
        with undo_on_error(self.uploads.pop, header.update_id, None):
            for tensor in header.tensors:
                if tensor.name != "norm":
                    raise InvalidRequest(f"{tensor.name} has no place", field="header.tensors")
            [size] = header.tensors[0].shape
            async for request in request_iterator:
                if (waiting := self.on_chunk()) is not None:
                    await waiting
                upload.chunks[request.chunk.offset] = request.chunk.data
            if len(upload.data) != 4 * size:
                raise InvalidRequest("norm: bytes are missing", field="chunk.name")

    def remove_uploads(self, unwanted: Callable[[str], bool]) -> None:
        """Remove the uploads to this worker whose id is ``unwanted``."""
        for update_id, upload in list(self.uploads.items()):
            if upload.owner == self.address and unwanted(update_id):
                del self.uploads[update_id]
