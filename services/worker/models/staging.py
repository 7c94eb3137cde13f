"""Reading of new weights for a model that runs."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from services.common.errors import FailedPrecondition, InvalidRequest
from services.common.model.checkpoint_files import CheckpointShard, StoredTensor
from services.common.model.json_object import JsonObject, read_json
from services.common.model.quantized.checkpoint import read_checkpoint
from services.worker.arena.host_copy import empty_on_host, free_on_host
from services.worker.described.checkpoint import checkpoint_shapes, is_ignored
from services.worker.described.config import ModelConfig
from services.worker.layers.fp8 import FP8
from services.worker.layers.quantized_weight import QuantizedWeight
from services.worker.models import weights
from services.worker.models.base import Staged
from services.worker.models.decoder import DecoderModel
from services.worker.models.quantized_shards import keeps_stored, weight_files

UPLOAD = "the upload"  # place of a tensor in errors
_FACTOR = 0x9E3779B97F4A7C15  # odd, and close to the golden ratio times 2^64
_POSITIONS = np.arange(1 << 17, dtype=np.uint64) * np.uint64(0xB0A2FA93E88556EA) + np.uint64(1)  # odd


def refuse_quantized(directory: Path) -> None:
    """Raise ``InvalidRequest`` if ``config.json`` in ``directory`` says that the weights of an update are quantized."""
    settings = JsonObject("config.json", read_json(directory / "config.json")).object("quantization_config")
    if settings.values:
        method = settings.text("quant_method", "unknown")
        raise InvalidRequest(
            f"{directory}: config.json has quantization_config.quant_method={method!r}, and weights of an update must"
            " not be quantized; write them in bfloat16 or float32, without this key: quantization=fp8 quantizes them as"
            " they are written",
            field="directory",
        )


def stage(directory: Path, model: DecoderModel, described: ModelConfig) -> Staged:
    """Return the checkpoint tensors in ``directory`` that ``model`` uses, in their stored dtype, or in float32.

    Tensors that are quantized are converted to float32.

    ``described`` is the description that the checkpoint fits. The files may be replaced afterwards. Raises
    ``InvalidRequest``, which names the tensor, if a file is broken or a tensor is missing, unexpected, of another shape
    or not finite, and ``FailedPrecondition`` if there is too little memory.
    """
    try:
        weights.check(directory, described)
        return _read(directory, model, described)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field="directory") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise InvalidRequest(f"{directory} cannot be read: {error}", field="directory") from error


def check_upload(tensors: Mapping[str, StoredTensor], described: ModelConfig) -> None:
    """Check the descriptions, by name, of tensors that will be uploaded.

    Raises ``InvalidRequest``, which names the tensor, if one is missing, unexpected, or of another shape or dtype.
    """
    expected = checkpoint_shapes(described)
    try:
        check_described(UPLOAD, tensors, expected, described)
        weights.check_missing(UPLOAD, expected.keys() - tensors.keys())
        check_unused(UPLOAD, tensors, expected)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field="header.tensors") from error


def check_described(
    place: str, tensors: Mapping[str, StoredTensor], expected: Mapping[str, Sequence[int]], described: ModelConfig
) -> None:
    """Compare descriptions of tensors, by name, with the ``expected`` shapes of the checkpoint's tensors.

    Raises ``InvalidRequest``, which names the tensor and ``place``, if one is unexpected, or of another shape or dtype.
    """
    for name, stored in tensors.items():
        _check_place(place, name, expected, described)
        weights.check_stored(place, name, stored, expected.get(name, stored.shape))


def check_unused(place: str, tensors: Mapping[str, StoredTensor], expected: Collection[str]) -> None:
    """Raise ``InvalidRequest`` if tensors that are not ``expected`` make up more than half of ``tensors``."""
    unused = {name: each.nbytes for name, each in tensors.items() if name not in expected}
    if 2 * sum(unused.values()) > sum(each.nbytes for each in tensors.values()):
        largest = max(unused, key=lambda name: unused[name])
        raise InvalidRequest(f"{place}: {largest} is not used by this model and makes {place} too large; leave it out")


@torch.no_grad()
def apply(staged: Staged, model: DecoderModel) -> None:
    """Write ``staged`` over the weights of ``model``, in place. No step may run.

    Raises ``InvalidRequest`` if a quantized tensor does not fit the model. Then nothing is written.
    """
    targets = model.targets()
    for name, tensor in staged.tensors.items():
        if isinstance(tensor, QuantizedWeight):
            with weights.refusing_unfit("the update", name):
                targets[name].check_quantized(tensor)
    for name, tensor in staged.tensors.items():
        if isinstance(tensor, QuantizedWeight):
            targets[name].copy_quantized(tensor)
        else:
            targets[name].copy_(tensor)


def _read(directory: Path, model: DecoderModel, described: ModelConfig) -> Staged:
    known, targets = checkpoint_shapes(described).keys(), model.targets()
    tensors: dict[str, torch.Tensor | QuantizedWeight] = {}
    fingerprint, free = 0, free_on_host(_wanted_bytes(directory, targets))
    for path, opened in weight_files(directory):
        with opened() as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                _check_place(path, name, known, described)
                if name not in known:
                    continue
                tensor = _copied(shard, name, targets.get(name), model.device)
                parts = tensor.parts if isinstance(tensor, QuantizedWeight) else [tensor]
                if not all(is_finite(each) for each in parts):
                    raise InvalidRequest(f"{path}: {name} has values that are not finite")
                for each in parts:
                    fingerprint ^= fingerprint_of(name, each)
                if name not in targets:
                    continue
                free -= tensor.nbytes
                if free < 0:
                    raise FailedPrecondition(
                        f"the host has too little memory for a copy of the weights in {directory}; end other programs"
                    )
                tensors[name] = tensor
    return Staged(tensors, fingerprint)


def _copied(shard: Any, name: str, target: Any, device: torch.device) -> torch.Tensor | QuantizedWeight:
    """Return a copy in host memory of a tensor of an open file, which may change. Quantized if ``target`` keeps it."""
    stored = shard.get_slice(name)
    if keeps_stored(target, stored):
        weight: QuantizedWeight = stored.weight()
        return weight.cloned()
    mapped = shard.get_tensor(name)
    return empty_on_host(mapped.shape, mapped.dtype, device).copy_(mapped)


def _wanted_bytes(directory: Path, wanted: Collection[str]) -> int:
    """Return the size of the ``wanted`` tensors in ``directory``, whose files were checked."""
    shards = (shard for shard in read_checkpoint(directory) if isinstance(shard, CheckpointShard))
    return sum(each.nbytes for shard in shards for name, each in shard.tensors.items() if name in wanted)


def _check_place(place: Path | str, name: str, known: Collection[str], described: ModelConfig) -> None:
    """Raise ``InvalidRequest`` if the tensor ``name`` of ``place`` is neither ``known`` nor ignored."""
    if name not in known and not is_ignored(name, described):
        raise InvalidRequest(f"{place}: {name} has no place in this architecture; leave it out")


def fingerprint_of(name: str, tensor: torch.Tensor) -> int:
    """Return a number from 0 to 2^64 - 1 that depends on name, dtype, shape, and each byte of ``tensor``.

    It detects changes, not attacks, and takes a tenth of the time of a cryptographic hash. It is a sum of words of 8
    bytes, each times an odd factor by its position.
    """
    described = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    total = int.from_bytes(hashlib.blake2b(described, digest_size=8).digest())
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(content) // 8 * 8
    words = content[:whole].view(np.uint64)
    for start in range(0, len(words), len(_POSITIONS)):
        chunk = words[start : start + len(_POSITIONS)]
        total = (total * _FACTOR + int(np.dot(chunk, _POSITIONS[: len(chunk)]))) % 2**64
    return (total * _FACTOR + int.from_bytes(content[whole:].tobytes())) % 2**64


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite. Their sum shows it at a fraction of the time, unless it overflows."""
    if tensor.sum(dtype=torch.float32).isfinite():
        return True
    # torch has no isfinite for fp8, whose sums do not overflow.
    return tensor.dtype != FP8 and bool(tensor.isfinite().all())
