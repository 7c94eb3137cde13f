"""Uploads to a real worker."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import safetensors.torch
import torch

from tests.worker.scheduler import Scheduler
from tests.worker.test_tensor_file import DTYPES, content
from tokasaurus.common.v1 import weights_pb2 as common
from tokasaurus.worker.v1 import weights_pb2 as w

Tensors = dict[str, torch.Tensor]


def tensors_of(checkpoint: Path) -> Tensors:
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    return tensors


def header(tensors: Tensors, update_id: str = "u") -> w.UploadWeightsRequest:
    described = [
        common.UploadedTensor(name=name, dtype=DTYPES.get(each.dtype, str(each.dtype)), shape=each.shape)
        for name, each in tensors.items()
    ]
    return w.UploadWeightsRequest(header=w.UploadHeader(update_id=update_id, tensors=described))


def chunk(name: str, offset: int, data: bytes) -> w.UploadWeightsRequest:
    return w.UploadWeightsRequest(chunk=common.TensorChunk(name=name, offset=offset, data=data))


def chunks(tensors: Tensors, size: int = 1000) -> Iterator[w.UploadWeightsRequest]:
    for name, each in tensors.items():
        data = content(each)
        for offset in range(0, len(data), size):
            yield chunk(name, offset, data[offset : offset + size])


async def prepare(scheduler: Scheduler, update_id: str = "u") -> bool:
    return (await scheduler.stub.PrepareUpload(w.PrepareUploadRequest(update_id=update_id))).needed


async def send(scheduler: Scheduler, messages: Iterable[w.UploadWeightsRequest], update_id: str = "u") -> None:
    """Prepare an upload and send it."""
    assert await prepare(scheduler, update_id)
    await scheduler.stub.UploadWeights(iter(list(messages)))


async def upload(scheduler: Scheduler, checkpoint: Path, update_id: str = "u") -> None:
    tensors = tensors_of(checkpoint)
    await send(scheduler, [header(tensors, update_id), *chunks(tensors)], update_id)


def files(directory: Path) -> list[str]:
    """Return the update ids of the uploads in ``directory``."""
    return sorted(path.name for path in directory.glob("toka-uploads/*/*"))
