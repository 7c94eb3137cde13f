"""Reads the headers of a model's weight files, not the weights. No torch here.

A safetensors file consists of 8 bytes with the length of a JSON object, that object (the header: dtype, shape and
offsets of each tensor), and the tensors' bytes. A GGUF file has all tensors of a model.
"""

import math
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest
from services.common.model.broken_file import AGAIN, BrokenFile
from services.common.model.gguf_file import GgufFile, is_gguf, read_gguf
from services.common.model.gguf_names import tensor_sources
from services.common.model.json_object import LARGEST_JSON, check_name, parse_json, read_json

INDEX = "model.safetensors.index.json"
_ALONE = "model.safetensors"
_GIT_LFS = b"version https://git-lfs"
# bits of an element, by dtype
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16},
    **{"BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
MOST_DIMENSIONS = 8
_END = 2**63  # the numbers of a header are below it


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file describes it."""

    dtype: str  # of the values that are read: a key of ``_BITS``
    shape: tuple[int, ...]
    packed: str = ""  # the type in a GGUF file, whose values are read as ``dtype`` unless they stay quantized

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8


@dataclass(frozen=True)
class CheckpointShard:
    """A weight file of a checkpoint."""

    path: Path
    size: int  # bytes
    tensors: dict[str, StoredTensor]

    @property
    def formats(self) -> list[str]:
        """The types of the tensors in the file, those with the most elements first."""
        elements: Counter[str] = Counter()
        for each in self.tensors.values():
            elements[each.packed or each.dtype] += math.prod(each.shape)
        return [name for name, _ in elements.most_common()]


def read_shards(directory: Path) -> Iterator[CheckpointShard | BrokenFile]:
    """Yield each file that the index names, or the only file. For a damaged file, yield a ``BrokenFile``.

    ``directory`` may also be a GGUF file.
    """
    if is_gguf(directory):
        try:
            yield gguf_shard(read_gguf(directory))
        except BrokenFile as broken:
            yield broken
        return
    try:
        placed = read_index(directory)
    except BrokenFile as broken:
        yield broken
        return
    for name in sorted(set(placed.values())) or [_ALONE]:
        try:
            shard = read_shard(directory / name)
        except BrokenFile as broken:
            yield broken
            continue
        if absent := [tensor for tensor, file in placed.items() if file == name and tensor not in shard.tensors]:
            yield BrokenFile(
                f"{INDEX} says that {name} contains {reprlib.repr(absent[0])}{_more(absent)}, but it does not",
                "fetch both again: they are of different versions",
            )
        else:
            yield shard


def gguf_shard(file: GgufFile) -> CheckpointShard:
    """Return a GGUF file's tensors by their names in safetensors files. Raises ``InvalidRequest``."""
    sources = tensor_sources(file)
    # The dtype is that of converted values. Weights that stay quantized are read as integers.
    tensors = {name: StoredTensor("F32", source.shape, source.tensor.type.name) for name, source in sources.items()}
    return CheckpointShard(file.path, file.size, tensors)


def weight_paths(directory: Path) -> list[Path]:
    """Return the weight files that the index names, or the only file. Raises ``InvalidRequest``."""
    if is_gguf(directory):
        return [directory]
    names = sorted(set(read_index(directory).values())) or [_ALONE]
    for name in names:
        if not (directory / name).is_file():
            raise BrokenFile(f"{directory / name} does not exist: the weights are incomplete", AGAIN)
    return [directory / name for name in names]


def read_index(directory: Path) -> dict[str, str]:
    """Return the file name of each tensor, or nothing if all tensors are in one file. Raises ``BrokenFile``."""
    path, alone = directory / INDEX, (directory / _ALONE).exists()
    try:
        content = read_json(path)
        placed = content.get("weight_map") if content else {}
        if not isinstance(placed, dict) or (content and not placed):
            raise InvalidRequest("weight_map must be an object with the file name of each tensor", field="model")
        placed = {tensor: check_name("weight_map", file) for tensor, file in placed.items()}
        if strange := next((file for file in placed.values() if not file.endswith(".safetensors")), None):
            raise InvalidRequest(f"weight_map: {reprlib.repr(strange)} is no safetensors file", field="model")
    except InvalidRequest as error:
        raise BrokenFile(f"{path} is no index ({error.message})", "fetch the file again") from error
    if not placed and not alone and any(directory.glob("*.bin")):
        raise BrokenFile(
            f"{directory} has weights as *.bin only",
            "convert them to safetensors: transformers' save_pretrained writes it",
        )
    if not placed and not alone:
        raise BrokenFile(
            f"{directory / _ALONE} does not exist, nor an index of several files: there are no weights",
            "toka-download model= with the hub's id fetches a whole model; load_format=dummy makes random weights",
        )
    return placed


def read_shard(path: Path) -> CheckpointShard:
    """Return a file's tensors, checked against its size. Raises ``BrokenFile``."""
    if not path.is_file():
        raise BrokenFile(f"{path} does not exist: the weights are incomplete", AGAIN)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if (first + file.read(len(_GIT_LFS) - 8)).startswith(_GIT_LFS):
                raise BrokenFile(f"{path} is a Git LFS pointer, not the file", "git lfs pull")
            if len(first) < 8 or length > min(size - 8, LARGEST_JSON):
                raise BrokenFile(f"{path} ({size:,} bytes) does not begin with the header of a safetensors file", AGAIN)
            file.seek(8)
            header = file.read(length)
    except OSError as error:
        raise BrokenFile(
            f"{path} cannot be read ({error.strerror})",
            "give this user the right to read it",
        ) from error
    try:
        tensors, end = parse_header(header)
    except (InvalidRequest, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.message if isinstance(error, InvalidRequest) else _shortened(error)
        raise BrokenFile(
            f"{path} ({size:,} bytes) does not begin with the header of a safetensors file: {reason}", AGAIN
        ) from error
    if size != 8 + length + end:
        raise BrokenFile(
            f"{path} has {size:,} bytes but its header describes {8 + length + end:,}: it is incomplete", AGAIN
        )
    return CheckpointShard(path, size, tensors)


def parse_header(header: bytes) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors by name, in the order of their bytes, and the offset in bytes at which the last one ends.

    Raises ``InvalidRequest``, ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` for a header that is
    malformed, or whose tensors do not follow each other without gaps.
    """
    described: dict[str, Any] = parse_json(header, "its header")
    described.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, each in sorted(described.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        begin, stop = each["data_offsets"]
        stored = tensors[name] = StoredTensor(each["dtype"], tuple(each["shape"]))
        if len(stored.shape) > MOST_DIMENSIONS:
            raise ValueError(f"{name}: shape has {len(stored.shape)} dimensions")
        if any(type(number) is not int or not 0 <= number < _END for number in (*stored.shape, begin, stop)):
            raise ValueError(f"{name}: shape and data_offsets must be integers from 0, below 2^63")
        if stored.dtype not in _BITS:
            raise ValueError(f"{name}: dtype {reprlib.repr(stored.dtype)} is unknown")
        if begin != end or (stop - begin) * 8 != math.prod(stored.shape) * _BITS[stored.dtype]:
            raise ValueError(f"{name}: data_offsets {begin} and {stop} do not fit its shape and its neighbours")
        end = stop
    return tensors, end


def _shortened(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
    return text if len(text) <= 200 else text[:200] + "..."


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
