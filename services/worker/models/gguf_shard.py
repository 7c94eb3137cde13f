"""Reads the tensors of a GGUF file, under the names of safetensors files and with their layout.

Values in blocks become float32, by the library ``gguf`` of ggml's authors. The target of a tensor rounds them to the
dtype of the model, or takes the integers of the blocks as they are.
"""

import math
import os
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import safetensors
import torch

from services.common.errors import InvalidRequest
from services.common.model.gguf_file import is_gguf, read_gguf
from services.common.model.gguf_names import TensorSource, tensor_sources
from services.common.model.quantized.gguf import SCHEMES
from services.common.model.quantized.scheme import Scheme
from services.worker.layers.quantized_weight import QuantizedWeight
from services.worker.models.gguf_blocks import read_blocks

# Types without blocks, which need no conversion.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = 1 << 16  # converted at once; the library makes several copies of their values


class GgufShard:
    """An open GGUF file, with the methods of ``safe_open`` of ``safetensors`` that loading uses."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "GgufShard":
        self._sources = tensor_sources(read_gguf(self._path))
        self._file = self._path.open("rb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._sources)

    def get_slice(self, name: str) -> "GgufSlice":
        """Return a tensor that is not read yet."""
        return GgufSlice(self._path, self._file, self._sources[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, float32 or the type of a tensor without blocks. Raises ``InvalidRequest``."""
        return self.get_slice(name)[:]


class GgufSlice:
    """A tensor of an open file. Its items are read when they are asked for."""

    def __init__(self, path: Path, file: BufferedReader, source: TensorSource) -> None:
        self._path, self._file, self._source = path, file, source

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._source.shape)

    @property
    def scheme(self) -> Scheme | None:
        """The scheme by which the tensor is quantized, or None."""
        return SCHEMES.get(self._source.tensor.type.name)

    def weight(self) -> QuantizedWeight:
        """Return the matrix ``[rows, columns]`` as integers, in which its type must be. Raises ``InvalidRequest``."""
        rows, columns = self._source.shape
        first = (self._source.expert or 0) * rows
        content = torch.from_numpy(self._content(first * columns, (first + rows) * columns))
        weight = read_blocks(content, self._source.tensor.type.name, columns)
        if self._source.change != "interleaved":
            return weight
        return weight.with_rows(self._uninterleaved)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the items of ``index``, as of a tensor. If it begins with a slice, only those rows are read."""
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = self._source.shape[0]
        start, stop, step = first.indices(rows) if isinstance(first, slice) else (0, rows, 0)
        # The last dimension consists of blocks, and rows of a head are interleaved.
        if step != 1 or len(self._source.shape) == 1 or self._source.change == "interleaved":
            return self._rows(0, rows)[index]
        return self._rows(start, max(start, stop))[(slice(None), *others)]

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the rows ``start`` to ``stop``, as the checkpoint has them."""
        source, shape = self._source, self._source.shape
        before = (source.expert or 0) * shape[0]
        inside = math.prod(shape[1:])  # elements of a row
        values = self._values((before + start) * inside, (before + stop) * inside).reshape(stop - start, *shape[1:])
        if source.change == "interleaved":
            values = self._uninterleaved(values)
        if source.change == "added":
            values = values.float() - 1.0
        return values

    def _uninterleaved(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` of all heads in the order of the checkpoint."""
        ordered: torch.Tensor = rows.unflatten(0, (self._source.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return ordered

    def _content(self, start: int, stop: int) -> np.ndarray:
        """Return the ``[bytes]`` uint8 of elements of the stored tensor. Both numbers are the beginning of a block.

        Raises ``InvalidRequest``.
        """
        kind = self._source.tensor.type
        content = np.empty((stop - start) // kind.elements * kind.nbytes, np.uint8)
        begin, done = self._source.tensor.offset + start // kind.elements * kind.nbytes, 0
        while done < len(content):  # without a position in the file, which threads would share
            count = os.preadv(self._file.fileno(), [content[done:].data], begin + done)
            if count == 0:
                raise InvalidRequest(
                    f"{self._path} ends inside of {self._source.tensor.name}; fetch the file again", field="model"
                )
            done += count
        return content

    def _values(self, start: int, stop: int) -> torch.Tensor:
        """Return elements of the stored tensor, ``[stop - start]``. Both are the beginning of a block."""
        kind, content = self._source.tensor.type, self._content(start, stop)
        if kind.name in _PLAIN:
            return torch.from_numpy(content).view(_PLAIN[kind.name])
        made = np.empty(stop - start, np.float32)
        for block in range(0, len(content) // kind.nbytes, _BLOCKS):
            values = _dequantize(content[block * kind.nbytes : (block + _BLOCKS) * kind.nbytes], kind.name)
            made[block * kind.elements : block * kind.elements + len(values)] = values
        return torch.from_numpy(made)


def _dequantize(content: np.ndarray, name: str) -> np.ndarray:
    """Return the values of whole blocks of the type ``name``, ``[bytes]`` uint8, as ``[values]`` float32."""
    import gguf  # loads clients of the hub, which only GGUF files need

    with np.errstate(all="ignore"):  # a damaged file has scales that are not finite
        # In one row, which the library converts at once.
        return gguf.quants.dequantize(content[np.newaxis], gguf.GGMLQuantizationType[name]).reshape(-1)


def open_shard(path: Path) -> Any:
    """Return a context with the tensors of a weight file: ``keys``, ``get_slice`` and ``get_tensor``."""
    return GgufShard(path) if is_gguf(path) else safetensors.safe_open(path, framework="pt")
