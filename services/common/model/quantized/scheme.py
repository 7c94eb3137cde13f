"""The description of how the weights of a module are quantized and stored."""

import reprlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from services.common.errors import InvalidRequest
from services.common.model.json_object import JsonObject
from services.common.model.quantized.patterns import NamePattern

# How the parts of a weight are stored:
# ``plain``: one tensor of 8-bit values, with scales
# ``packed``: ``pack-quantized`` of compressed-tensors: values in words of 32 bits, along the inputs
# ``gptq``: values in words along the inputs, transposed, and zeros minus one; ``gptq_v2``: zeros as they are
# ``awq``: values in words along the outputs, in AWQ's order of columns, transposed
# ``mxfp4``: the experts of gpt-oss, two values a byte
# ``gguf``: blocks of a GGUF file with scales in float16; ``gguf_k``: blocks with scales of two levels (K quants)
Layout: TypeAlias = Literal["plain", "packed", "gptq", "gptq_v2", "awq", "mxfp4", "gguf", "gguf_k"]
ALL = 0  # in a block: all rows, or all columns
LARGEST_BLOCK = 1 << 20  # rows or columns of a block


@dataclass(frozen=True)
class Scheme:
    """The form in which the weights of a module are quantized.

    A weight is ``(value - zero) * scale``, in GGUF files ``value * scale + offset``. The values of a block share scale,
    zero and offset. A block has ``block[0]`` rows (outputs) and ``block[1]`` columns (inputs).
    """

    layout: Layout
    kind: Literal["float", "int", "other"]  # other: a type that is always converted, without bits and a block
    bits: int  # of a stored value: 4 or 8
    block: tuple[int, int] | None  # None = one scale per tensor or per row, as the shape of the scales says
    zeros: bool = False  # the weight must have zeros or offsets; without them, values are around zero
    symmetric: bool = False  # values are around zero, although the weight has zeros
    ordered: bool = False  # the weight may have the block of each column
    act_order: bool = False  # the columns of a block need not be neighbours
    name: str = ""  # of the format, if it has one

    def __str__(self) -> str:
        if self.name:
            return self.name
        name = "MXFP4" if self.layout == "mxfp4" else f"{'FP' if self.kind == 'float' else 'INT'}{self.bits}"
        if self.block is None:
            return name
        rows, columns = self.block
        if rows == ALL:
            return f"{name} with one scale per tensor"
        if columns == ALL:
            return f"{name} with one scale per row"
        return f"{name} in groups of {columns}" if rows == 1 else f"{name} in blocks of {rows} x {columns}"


@dataclass(frozen=True)
class SchemeRule:
    """The scheme of the modules whose name matches one of ``patterns``. None means that they are not quantized."""

    patterns: tuple[NamePattern, ...]
    scheme: Scheme | None


@dataclass(frozen=True)
class Quantization:
    """The schemes of all modules of a checkpoint. The first rule that matches a module counts."""

    method: str  # ``quant_method`` of ``config.json``
    rules: tuple[SchemeRule, ...]

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of ``module``, or None if ``quantization_config`` says that it is not quantized."""
        for rule in self.rules:
            if any(pattern.matches(module) for pattern in rule.patterns):
                return rule.scheme
        return None


def grouped(scheme: Scheme, size: int) -> Scheme:
    """Return ``scheme`` with groups of ``size`` columns, which may be -1: all columns of a row are a group."""
    return replace(scheme, block=(1, ALL if size == -1 else size))


def refuse_others(given: JsonObject, known: Collection[str], path: str = "") -> None:
    """Raise ``InvalidRequest`` for a key that has a value and is not ``known``: it may change what values mean.

    ``path`` is the place of ``given`` in ``quantization_config``.
    """
    unknown = {name for name, value in given.values.items() if not is_empty(value)}
    if others := sorted(unknown - set(known)):
        raise refused(f"{path}{others[0][:80]}", reprlib.repr(given.values[others[0]]), "that it is absent")


def is_empty(value: Any) -> bool:
    """Return whether ``value`` of a key has the meaning of an absent key."""
    return value is None or value is False or value in ("", [], {})


def refused(key: str, value: str, expected: str) -> InvalidRequest:
    """Return the error for a ``value`` of ``key`` in ``quantization_config`` that is not supported."""
    return InvalidRequest(
        f"config.json: quantization_config.{key}={value} is not supported; expected {expected}: choose another"
        " checkpoint of the model, for example in bfloat16, which quantization=fp8 quantizes at the start",
        field="model",
    )
