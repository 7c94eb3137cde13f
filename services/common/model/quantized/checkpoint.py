"""The weight files of a model as loading sees them: a quantized weight counts as one tensor of float32 values."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from services.common.errors import InvalidRequest
from services.common.model.broken_file import BrokenFile
from services.common.model.checkpoint_files import CheckpointShard, StoredTensor, read_shards
from services.common.model.gguf_file import is_gguf
from services.common.model.json_object import read_json
from services.common.model.quantized.scheme import Quantization
from services.common.model.quantized.settings import read_quantization
from services.common.model.quantized.tensors import CODES, QuantizedTensor, quantized_tensors


def quantization_of(directory: Path) -> Quantization | None:
    """Return how the weights in ``directory`` are quantized, or None. Raises ``InvalidRequest``.

    The blocks of a GGUF file, which ``directory`` may also be, are not described here; see ``gguf_quantization``.
    """
    return None if is_gguf(directory) else read_quantization(read_json(directory / "config.json"))


def read_checkpoint(directory: Path) -> Iterator[CheckpointShard | BrokenFile]:
    """Yield the files in ``directory`` as ``read_shards`` does, with whole weights instead of their stored parts.

    A weight belongs to the file that has its values. Raises ``InvalidRequest`` if the weights are quantized in a way
    that is not supported, or if parts do not fit each other.
    """
    quantization = quantization_of(directory)
    shards = list(read_shards(directory))
    broken = any(isinstance(shard, BrokenFile) for shard in shards)
    if quantization is None or broken:
        yield from shards
        return
    files = [shard for shard in shards if isinstance(shard, CheckpointShard)]
    found, used = parts_of(directory, quantization, files)
    for shard in files:
        tensors = {name: stored for name, stored in shard.tensors.items() if name not in used}
        whole = {name: each.described for name, each in found.items() if each.parts[CODES] in shard.tensors}
        yield replace(shard, tensors=tensors | whole)


def parts_of(
    directory: Path, quantization: Quantization, files: Sequence[CheckpointShard]
) -> tuple[dict[str, QuantizedTensor], set[str]]:
    """Return the quantized weights in ``files`` by name, and the names of the tensors that store them."""
    stored: dict[str, StoredTensor] = {name: each for shard in files for name, each in shard.tensors.items()}
    try:
        return quantized_tensors(quantization, stored)
    except InvalidRequest as error:
        raise InvalidRequest(f"{directory}: {error.message}", field="model") from error
