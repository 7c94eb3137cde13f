"""Reads the weights of a quantized checkpoint as float32, under the names of a checkpoint that is not quantized.

The parts of a weight may lie in different files, so all files are open together.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch

from services.common.model.broken_file import BrokenFile
from services.common.model.checkpoint_files import CheckpointShard, read_shards, weight_paths
from services.common.model.quantized.checkpoint import parts_of, quantization_of
from services.common.model.quantized.scheme import Quantization, Scheme
from services.common.model.quantized.tensors import CODES, SCALES, QuantizedTensor
from services.worker.layers.quantized_weight import QuantizedWeight, keeps
from services.worker.models.gguf_shard import GgufSlice, open_shard
from services.worker.models.quantized_weight import read_experts, read_weight


class QuantizedShards:
    """The open files of a checkpoint, with the methods of ``safe_open`` of ``safetensors`` that loading uses."""

    def __init__(
        self, quantization: Quantization, files: dict[str, Any], found: dict[str, QuantizedTensor], used: set[str]
    ) -> None:
        """``files`` are the open files by the names of their tensors. ``found`` and ``used`` are from ``parts_of``."""
        self._quantization, self._files, self._found, self._used = quantization, files, found, used

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return [name for name in self._files if name not in self._used] + list(self._found)

    def is_zero_bias(self, name: str) -> bool:
        """Return whether ``name`` is the bias of a quantized module and zero. AutoGPTQ writes it for each module."""
        module, _, part = name.rpartition(".")
        return part == "bias" and f"{module}.weight" in self._found and not self._files[name].get_tensor(name).any()

    def unused_scheme(self, name: str) -> Scheme | None:
        """Return the scheme of a weight by ``quantization_config``, if the files have it without quantization."""
        module, _, part = name.rpartition(".")
        return None if part != "weight" or name in self._found else self._quantization.scheme_of(module)

    def get_slice(self, name: str) -> Any:
        """Return a tensor that is not read yet."""
        if name not in self._found:
            return self._files[name].get_slice(name)
        return QuantizedSlice(name, self._found[name], self._files)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, float32 if it is quantized. Raises ``InvalidRequest``."""
        if name not in self._found:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
            return tensor
        return QuantizedSlice(name, self._found[name], self._files)[...]


class QuantizedSlice:
    """A quantized tensor of open files. Reading an item converts the whole tensor, or a whole expert."""

    def __init__(self, name: str, tensor: QuantizedTensor, files: dict[str, Any]) -> None:
        self._name, self._tensor, self._files = name, tensor, files
        self._kept: tuple[int | None, torch.Tensor] | None = None  # the expert, and its values

    @property
    def scheme(self) -> Scheme:
        """The scheme by which the tensor is quantized."""
        return self._tensor.scheme

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the items of ``index``, as of a tensor of float32. Raises ``InvalidRequest``."""
        if self._tensor.scheme.layout != "mxfp4":
            return self._values(None)[index]
        if isinstance(index, int):
            return self._values(index)
        return torch.stack([self._values(expert) for expert in range(self._tensor.shape[0])])[index]

    def _values(self, expert: int | None) -> torch.Tensor:
        """Return the values of the tensor, or of one expert, and keep them for the next part of the tensor."""
        if self._kept is None or self._kept[0] != expert:
            self._kept = None  # free the values first
            weight = self.weight(expert)
            values = weight.dequantized()
            self._kept = expert, values if expert is None else values.t()
        return self._kept[1]

    def weight(self, expert: int | None = None) -> QuantizedWeight:
        """Return the weight before its conversion. ``expert`` is given if the tensor has the experts of a layer."""
        parts = self._tensor.parts
        if expert is None:
            read = {role: self._files[part].get_tensor(part) for role, part in parts.items()}
            return read_weight(self._name, self._tensor.scheme, read)
        codes, scales = (self._files[parts[role]].get_slice(parts[role])[expert] for role in (CODES, SCALES))
        return read_experts(self._tensor.scheme, codes, scales)


def keeps_stored(target: Any, stored: Any) -> bool:
    """Return whether a load target takes ``stored``, a tensor that is not read yet, as it is quantized."""
    scheme = stored.scheme if isinstance(stored, QuantizedSlice | GgufSlice) else None
    return scheme is not None and keeps(target, scheme)


@contextmanager
def open_quantized(directory: Path, quantization: Quantization) -> Iterator[QuantizedShards]:
    """Open the files in ``directory``. Raises ``InvalidRequest`` if they are broken or parts do not fit each other."""
    shards: list[CheckpointShard] = []
    for shard in read_shards(directory):
        if isinstance(shard, BrokenFile):
            raise shard
        shards.append(shard)
    found, used = parts_of(directory, quantization, shards)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for shard in shards:
            file = stack.enter_context(safetensors.safe_open(shard.path, framework="pt"))
            files |= dict.fromkeys(shard.tensors, file)
        yield QuantizedShards(quantization, files, found, used)


def weight_files(directory: Path) -> Iterator[tuple[Path, Callable[[], Any]]]:
    """Yield the path of each weight file, and a function that opens it.

    The function returns a context with the tensors of the file: ``keys``, ``get_slice`` and ``get_tensor``. A quantized
    checkpoint is one path, with the tensors of all its files. Raises ``InvalidRequest``.
    """
    quantization = quantization_of(directory)
    if quantization is not None:
        yield directory, partial(open_quantized, directory, quantization)
        return
    for path in weight_paths(directory):
        yield path, partial(open_shard, path)
