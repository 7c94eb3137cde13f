"""Reads the header of a GGUF file as untrusted data: its fields, and where its tensors are. No torch.

A GGUF file (ggml-org, version 2 or 3) consists of the bytes ``GGUF``, a version, the numbers of tensors and fields, the
fields (name, type, value), the descriptions of the tensors (name, shape, type, offset), and the tensors' bytes.
Numbers are little-endian. The reader of the library ``gguf`` needs seconds for a vocabulary, and does not bound what a
damaged file makes it allocate, so the header is read here.
"""

import math
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from services.common.model.broken_file import AGAIN, BrokenFile
from services.common.model.json_object import LARGEST_TOKENIZER, MOST_VOCABULARY, JsonObject

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_GIT_LFS = b"version https://git-lfs"
_FIRST = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of fields
_MOST_FIELDS, _MOST_TENSORS = 1 << 14, 1 << 16
_MOST_ITEMS = MOST_VOCABULARY  # items of all arrays together; a published vocabulary has 0.8 million with its merges
_LONGEST_NAME, _LONGEST_TEXT = 1024, 1 << 20  # bytes
_MOST_DIMENSIONS = 4
_MOST_ELEMENTS = 1 << 48  # of a tensor; the files' sizes bound the bytes
_LARGEST_ALIGNMENT = 1 << 16  # bytes
_BUFFER = 1 << 20  # bytes read at once
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8"}
_SCALARS |= {12: "<f8"}
_BOOLEAN, _TEXT, _ARRAY = 7, 8, 9


class BlockType(NamedTuple):
    """A type of tensor: its values are stored in blocks."""

    name: str
    elements: int  # of a block
    nbytes: int  # of a block


# By the number in the file. Left out are integers, and types that no published model has.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as its file describes it."""

    name: str
    shape: tuple[int, ...]  # as in torch: the last dimension is contiguous
    type: BlockType
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        """The size in the file, in bytes."""
        return math.prod(self.shape) // self.type.elements * self.type.nbytes


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    size: int  # bytes
    fields: dict[str, Any]  # numbers, booleans, strings, and lists of one of them
    tensors: dict[str, GgufTensor]

    @property
    def given(self) -> JsonObject:
        """Checked access to the fields."""
        return JsonObject(str(self.path), self.fields)

    def floats(self, name: str, most: int) -> list[float] | None:
        """Return the values of an F32 tensor of one dimension, or None if it is absent. Raises ``BrokenFile``."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > most:
            raise BrokenFile(f"{self.path}: {name} must have one dimension of at most {most} values of type F32", AGAIN)
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            content = file.read(tensor.nbytes)
        if len(content) != tensor.nbytes:
            raise BrokenFile(f"{self.path}: it ends inside of {name}", AGAIN)
        return [float(each) for each in np.frombuffer(content, "<f4")]


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` has the suffix of a GGUF file and is not a directory."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_gguf(path: Path) -> GgufFile:
    """Return the header of the file ``path``, checked against its size. Raises ``BrokenFile``."""
    try:
        if not path.is_file():
            raise BrokenFile(f"{path} is not a regular file", "give the path of a GGUF file")
        size = path.stat().st_size
        with path.open("rb", buffering=_BUFFER) as file:
            return _Header(file, size).read(path)
    except OSError as error:
        raise BrokenFile(f"{path} cannot be read ({error.strerror})", "give this user the right to read it") from error
    except (ValueError, OverflowError) as error:
        raise BrokenFile(f"{path} ({size:,} bytes) is not a complete GGUF file: {error}", AGAIN) from error


class _Header:
    """Reader of the header. Its methods raise ``ValueError`` with the defect."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._at = 0  # bytes read so far
        self._items = 0  # of arrays

    def read(self, path: Path) -> GgufFile:
        """Return the whole header."""
        first = self._take(_FIRST.size)
        if first.startswith(_GIT_LFS[: _FIRST.size]):
            raise BrokenFile(f"{path} is a Git LFS pointer, not the file", "git lfs pull")
        magic, version, tensors, fields = _FIRST.unpack(first)
        if magic != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; expected 2 or 3, little-endian")
        if tensors > _MOST_TENSORS or fields > _MOST_FIELDS:
            raise ValueError(
                f"it claims {tensors:,} tensors and {fields:,} fields; at most {_MOST_TENSORS:,} and {_MOST_FIELDS:,}"
                " are read"
            )
        found: dict[str, Any] = {}
        for _ in range(fields):
            name = self._text(_LONGEST_NAME)
            if name in found:
                raise ValueError(f"it has the field {reprlib.repr(name)} twice")
            found[name] = self._value(name, self._number(4))
        described = [self._tensor() for _ in range(tensors)]
        return GgufFile(path, self._size, found, self._placed(described, _alignment(found)))

    def _take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        if size > self._size - self._at:
            raise ValueError(f"it ends inside of its header, which needs {size:,} bytes after byte {self._at:,}")
        if self._at + size > LARGEST_TOKENIZER:
            raise ValueError(f"its header has more than {LARGEST_TOKENIZER:,} bytes")
        content = self._file.read(size)
        if len(content) != size:
            raise ValueError("it became shorter while it was read")
        self._at += size
        return content

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self, longest: int) -> str:
        length = self._number(8)
        if length > longest:
            raise ValueError(f"a text at byte {self._at:,} claims {length:,} bytes; at most {longest:,} are read")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the text that ends at byte {self._at:,} is not UTF-8") from error

    def _value(self, name: str, kind: int) -> Any:
        if kind == _TEXT:
            return self._text(_LONGEST_TEXT)
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind != _ARRAY:
            raise ValueError(f"the field {reprlib.repr(name)} has the unknown type {kind}")
        kind, count = self._number(4), self._number(8)
        self._items += count
        if self._items > _MOST_ITEMS:
            raise ValueError(f"its arrays have more than {_MOST_ITEMS:,} items")
        if kind == _TEXT:
            return [self._text(_LONGEST_TEXT) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"the field {reprlib.repr(name)} is an array of items of the type {kind}")
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        listed: list[Any] = (values != 0 if kind == _BOOLEAN else values).tolist()
        return listed

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, number of the type, and offset from the first tensor."""
        name, dimensions = self._text(_LONGEST_NAME), self._number(4)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {reprlib.repr(name)} has {dimensions} dimensions")
        shape = tuple(self._number(8) for _ in range(dimensions))[::-1]
        return name, shape, self._number(4), self._number(8)

    def _placed(self, described: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors by name. Raises ``ValueError`` if they overlap or do not lie inside of the file."""
        begin = -(-self._at // alignment) * alignment
        end, tensors = begin, {}
        for name, shape, kind, offset in sorted(described, key=lambda each: each[3]):
            shown = reprlib.repr(name)
            if name in tensors:
                raise ValueError(f"it has the tensor {shown} twice")
            if kind not in BLOCK_TYPES:
                raise ValueError(
                    f"the tensor {shown} has the type {kind}; supported are"
                    f" {', '.join(f'{number} ({each.name})' for number, each in BLOCK_TYPES.items())}"
                )
            if not 1 <= math.prod(shape) <= _MOST_ELEMENTS or shape[-1] % BLOCK_TYPES[kind].elements:
                raise ValueError(f"the tensor {shown} of type {BLOCK_TYPES[kind].name} has the shape {list(shape)}")
            tensor = tensors[name] = GgufTensor(name, shape, BLOCK_TYPES[kind], begin + offset)
            if offset % alignment or tensor.offset < end:
                raise ValueError(f"the tensor {shown} begins at {offset}, which does not fit its neighbours")
            end = tensor.offset + tensor.nbytes
            if end > self._size:
                raise ValueError(f"the tensor {shown} would end at byte {end:,}")
        return tensors


def _alignment(fields: dict[str, Any]) -> int:
    """Return the multiple of bytes at which tensors begin."""
    value = fields.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= _LARGEST_ALIGNMENT or value & (value - 1):
        raise ValueError(f"general.alignment={reprlib.repr(value)} is not a power of two up to {_LARGEST_ALIGNMENT}")
    return value
