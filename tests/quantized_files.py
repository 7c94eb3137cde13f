"""Quantized copies of checkpoints, as the libraries that publish them write them, each with a copy of its exact values.

Packing follows the sources of the libraries: ``pack_to_int32`` of compressed-tensors, ``WQLinear_GEMM.from_linear`` of
AutoAWQ, ``pack_original`` of GPTQModel, and the published files of gpt-oss. Values are computed in float64.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LINEAR = re.compile(r".*\.layers\.\d+\..*(_proj|\.w[123])\.weight$")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_LARGEST_FP8 = 448.0


@dataclass(frozen=True)
class Stored:
    """The tensors that store a weight, by the ends of their names, and the values that they mean, float64."""

    parts: dict[str, torch.Tensor]
    values: np.ndarray


Store = Callable[[np.ndarray], Stored]


def write_quantized(
    source: Path, target: Path, store: Store, settings: dict[str, Any], *, chosen: re.Pattern[str] = LINEAR
) -> tuple[Path, Path]:
    """Write a copy of ``source`` whose weights with ``chosen`` names are as ``store`` makes them.

    ``settings`` is ``quantization_config``. Return its directory, and that of a copy with the exact values.
    """
    exact = target.with_name(f"{target.name}-exact")
    for directory in (target, exact):
        shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    quantized, values = {}, {}
    for name, tensor in tensors.items():
        if not chosen.match(name):
            quantized[name] = values[name] = tensor
            continue
        stored = store(tensor.double().numpy())
        module = name.removesuffix(".weight")
        quantized |= {f"{module}{end}": part.contiguous() for end, part in stored.parts.items()}
        values[name] = torch.from_numpy(np.ascontiguousarray(stored.values)).float()
    save_file(quantized, target / "model.safetensors", metadata={"format": "pt"})
    save_file(values, exact / "model.safetensors", metadata={"format": "pt"})
    change_config(target, quantization_config=settings)
    return target, exact


def change_config(directory: Path, **changes: Any) -> None:
    """Change keys of ``config.json`` in ``directory``."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the file in ``directory``, or remove those that are None."""
    tensors = load_file(directory / "model.safetensors") | changes
    left = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(left, directory / "model.safetensors", metadata={"format": "pt"})


def blocks_of(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the largest magnitude of each block. A size of 0 is all rows or columns."""
    rows, columns = rows or values.shape[0], columns or values.shape[1]
    return np.array(
        [
            [np.abs(values[row : row + rows, column : column + columns]).max() for column in steps(values, 1, columns)]
            for row in steps(values, 0, rows)
        ]
    )


def steps(values: np.ndarray, dimension: int, size: int) -> range:
    """Return where the blocks along ``dimension`` begin."""
    return range(0, values.shape[dimension], size)


def expanded(blocks: np.ndarray, shape: tuple[int, ...], rows: int, columns: int) -> np.ndarray:
    """Return the element of ``blocks`` of each value."""
    rows, columns = rows or shape[0], columns or shape[1]
    return blocks[np.arange(shape[0]) // rows][:, np.arange(shape[1]) // columns]


def fp8(
    rows: int, columns: int, *, name: str = ".weight_scale_inv", shape: tuple[int, ...] | None = None
) -> Callable[[np.ndarray], Stored]:
    """Return a store of fp8 in blocks. ``shape`` is that of the scales, if it is not that of the blocks."""

    def store(values: np.ndarray) -> Stored:
        scales = (blocks_of(values, rows, columns) / _LARGEST_FP8).astype(np.float32)
        whole = expanded(scales, values.shape, rows, columns).astype(np.float64)
        codes = torch.from_numpy(values / whole).float().to(torch.float8_e4m3fn)
        kept = torch.from_numpy(scales if shape is None else scales.reshape(shape))
        return Stored({".weight": codes, name: kept}, codes.double().numpy() * whole)

    return store


@dataclass(frozen=True)
class Integers:
    """A weight in groups of columns: ``(codes - zeros) * scales``."""

    codes: np.ndarray  # [rows, columns], from 0
    zeros: np.ndarray  # [rows, groups]
    scales: np.ndarray  # [rows, groups] float16
    groups: np.ndarray  # [columns]

    @property
    def values(self) -> np.ndarray:
        """The values, ``[rows, columns]`` float64."""
        return (self.codes - self.zeros[:, self.groups]) * self.scales.astype(np.float64)[:, self.groups]


def integers(
    values: np.ndarray, bits: int, size: int, *, symmetric: bool = False, order: np.ndarray | None = None
) -> Integers:
    """Quantize ``values`` in groups of ``size`` columns (-1: all), which follow each other in ``order``."""
    columns = values.shape[1]
    size = columns if size == -1 else size
    groups = np.arange(columns) // size
    if order is not None:
        groups = np.empty_like(groups)
        groups[order] = np.arange(columns) // size
    most, count = 2**bits - 1, groups.max() + 1
    low = np.stack([values[:, groups == group].min(axis=1) for group in range(count)], axis=1)
    high = np.stack([values[:, groups == group].max(axis=1) for group in range(count)], axis=1)
    if symmetric:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    scales = ((high - low) / most).astype(np.float16)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scales), 0, most)
    codes = np.clip(np.round(values / scales[:, groups].astype(np.float64)) + zeros[:, groups], 0, most)
    return Integers(codes.astype(np.int64), zeros.astype(np.int64), scales, groups)


def packed(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack ``values [rows, columns]`` along the columns into words, the first value in the lowest bits.

    ``order`` has the column, within a word, of each place.
    """
    count = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % count))).astype(np.uint32)
    words = np.zeros((padded.shape[0], padded.shape[1] // count), np.uint32)
    for place in range(count):
        words |= padded[:, (order or range(count))[place] :: count] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def gptq(size: int, *, bits: int = 4, order: bool = False, version: int = 1, symmetric: bool = False) -> Store:
    """Return a store of GPTQ. With ``order``, columns are in groups by act-order."""

    def store(values: np.ndarray) -> Stored:
        chosen = np.random.default_rng(0).permutation(values.shape[1]) if order else None
        made = integers(values, bits, size, symmetric=symmetric, order=chosen)
        zeros = packed(made.zeros.T, bits)
        if version == 1:
            zeros = zeros - (0x11111111 if bits == 4 else 0x01010101)
        parts = {
            ".qweight": packed(made.codes, bits).t(),
            ".qzeros": zeros,
            ".scales": torch.from_numpy(made.scales).t(),
            ".g_idx": torch.from_numpy(made.groups).int(),
        }
        return Stored(parts, made.values)

    return store


def awq(size: int) -> Store:
    """Return a store of AWQ, version ``gemm``."""

    def store(values: np.ndarray) -> Stored:
        made = integers(values, 4, size)
        parts = {
            ".qweight": packed(made.codes.T, 4, _AWQ_ORDER),
            ".qzeros": packed(made.zeros.T, 4, _AWQ_ORDER),
            ".scales": torch.from_numpy(made.scales).t(),
        }
        return Stored(parts, made.values)

    return store


def pack_quantized(size: int, *, bits: int = 4, symmetric: bool = True, order: bool = False) -> Store:
    """Return a store of ``pack-quantized``."""

    def store(values: np.ndarray) -> Stored:
        chosen = np.random.default_rng(0).permutation(values.shape[1]) if order else None
        made = integers(values, bits, size, symmetric=symmetric, order=chosen)
        parts = {
            ".weight_packed": packed(made.codes, bits),
            ".weight_scale": torch.from_numpy(made.scales),
            ".weight_shape": torch.tensor(values.shape),
        }
        if not symmetric:
            parts[".weight_zero_point"] = packed(made.zeros.T, bits).t()
        if order:
            parts[".weight_g_idx"] = torch.from_numpy(made.groups).int()
        return Stored(parts, made.values)

    return store


def int8(size: int, *, symmetric: bool = True) -> Store:
    """Return a store of ``int-quantized``: int8 with a scale per row (-1), or in groups."""

    def store(values: np.ndarray) -> Stored:
        made = integers(values, 8, size, symmetric=symmetric)
        parts = {
            ".weight": torch.from_numpy(made.codes - 128).to(torch.int8),
            ".weight_scale": torch.from_numpy(made.scales),
        }
        if not symmetric:
            parts[".weight_zero_point"] = torch.from_numpy(made.zeros - 128).to(torch.int8)
        return Stored(parts, made.values)

    return store


def mxfp4(values: np.ndarray) -> Stored:
    """Store the experts ``[experts, inputs, outputs]`` of a layer of gpt-oss."""
    experts, inputs, outputs = values.shape
    grouped = values.transpose(0, 2, 1).reshape(experts, outputs, inputs // 32, 32)
    exponents = np.floor(np.log2(np.abs(grouped).max(axis=-1, keepdims=True))) - 2
    codes = np.abs(grouped[..., np.newaxis] / 2 ** exponents[..., np.newaxis] - _FP4).argmin(axis=-1).astype(np.uint8)
    exact = (_FP4[codes] * 2**exponents).reshape(experts, outputs, inputs).transpose(0, 2, 1)
    parts = {
        "_blocks": torch.from_numpy(codes[..., 0::2] | (codes[..., 1::2] << 4)),
        "_scales": torch.from_numpy((exponents[..., 0] + 127).astype(np.uint8)),
    }
    return Stored(parts, exact)


def compressed(kept: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return ``quantization_config`` of compressed-tensors with one group, as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kept,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    } | others
