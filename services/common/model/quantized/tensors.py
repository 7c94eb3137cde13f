"""Finds the tensors of a checkpoint that together store a quantized weight, and checks their shapes and dtypes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import StoredTensor
from services.common.model.quantized.scheme import ALL, Quantization, Scheme

CODES, SCALES, ZEROS, ORDER, SHAPE = "codes", "scales", "zeros", "order", "shape"  # roles of parts
MXFP4_BLOCK = 32  # values of a scale
_WORD = 32  # bits of a word of packed values
_FP8, _INT8 = "F8_E4M3", "I8"
_ONE_BYTE = {_FP8, _INT8, "F8_E5M2", "U8"}
_FLOAT_SCALES = ("BF16", "F16", "F32", "F8_E8M0")
_INTEGERS = ("I32", "I64")
# Names of the parts of a weight, by layout and role. Of several names, a checkpoint has one.
_GPTQ: dict[str, tuple[str, ...]] = {CODES: ("qweight",), SCALES: ("scales",), ZEROS: ("qzeros",), ORDER: ("g_idx",)}
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "plain": {
        **{CODES: ("weight",), SCALES: ("weight_scale", "weight_scale_inv"), ZEROS: ("weight_zero_point",)},
        **{ORDER: ("weight_g_idx",)},
    },
    "packed": {
        **{CODES: ("weight_packed",), SCALES: ("weight_scale",), ZEROS: ("weight_zero_point",)},
        **{ORDER: ("weight_g_idx",), SHAPE: ("weight_shape",)},
    },
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": {CODES: ("qweight",), SCALES: ("scales",), ZEROS: ("qzeros",)},
}
_PACKED = {"weight_packed", "qweight"}
_BLOCKS = "_blocks"  # suffix of the experts of gpt-oss
# Scales of activations, which are not used: products are computed in ``dtype``.
_ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")
_FIX = "config.json and the weights do not belong together: fetch both again"


class StoredPart(NamedTuple):
    """A tensor that stores a part of a weight."""

    name: str
    dtypes: tuple[str, ...]  # that are supported
    shapes: tuple[tuple[int, ...], ...]  # that are supported; they have the same elements


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight that several stored tensors describe."""

    scheme: Scheme  # with its block
    shape: tuple[int, ...]  # of the weight: rows (outputs) and columns (inputs), or as the experts of gpt-oss have it
    parts: dict[str, str]  # names of the stored tensors by role

    @property
    def described(self) -> StoredTensor:
        """The weight as ``read_shards`` describes tensors. It is converted to float32 when it is read."""
        return StoredTensor("F32", self.shape, str(self.scheme))


def quantized_tensors(
    quantization: Quantization, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, QuantizedTensor], set[str]]:
    """Return the quantized weights by name, and the names in ``stored`` that are parts of them.

    ``stored`` has the tensors of all files. Raises ``InvalidRequest``, which names the tensor, if a part is missing or
    has an unexpected shape or dtype, or if ``quantization`` says that the module is not quantized.
    """
    found: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    for name, each in stored.items():
        module, _, part = name.rpartition(".")
        if part.endswith(_BLOCKS) and quantization.method == "mxfp4":
            weight = name.removesuffix(_BLOCKS)
            tensor = _mxfp4(weight, _scheme(quantization, name, weight, {"mxfp4"}), stored)
        elif part in _PACKED or (part == "weight" and _is_quantized(module, each, stored)):
            weight = f"{module}.weight"
            layouts = {layout for layout, names in _NAMES.items() if part in names[CODES]}
            tensor = _find(module, _scheme(quantization, name, module, layouts), stored)
        else:
            continue
        if weight in stored and weight != name:
            raise InvalidRequest(f"{name}: {weight} is stored too; remove one of them", field="model")
        found[weight] = tensor
        used |= {*tensor.parts.values(), *(f"{module}.{unused}" for unused in _ACTIVATIONS)}
    return found, used & stored.keys()


def _is_quantized(module: str, weight: StoredTensor, stored: Mapping[str, StoredTensor]) -> bool:
    return weight.dtype in _ONE_BYTE or any(f"{module}.{name}" in stored for name in _NAMES["plain"][SCALES])


def _scheme(quantization: Quantization, name: str, module: str, layouts: Collection[str]) -> Scheme:
    """Return the scheme of ``module``, of which ``name`` is stored. It must have one of ``layouts``."""
    scheme = quantization.scheme_of(module)
    if scheme is None:
        raise InvalidRequest(
            f"{name} is quantized, but quantization_config of config.json says that {module} is not (by its list of"
            f" exceptions or targets); {_FIX}",
            field="model",
        )
    if scheme.layout not in layouts:
        wanted = _BLOCKS if scheme.layout == "mxfp4" else f".{_NAMES[scheme.layout][CODES][0]}"
        raise InvalidRequest(
            f"{name} does not fit quant_method={quantization.method!r} of config.json, with which"
            f" {module}{wanted} is expected; {_FIX}",
            field="model",
        )
    return scheme


def _find(module: str, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> QuantizedTensor:
    names = {}
    for role, options in _NAMES[scheme.layout].items():
        present = [f"{module}.{option}" for option in options if f"{module}.{option}" in stored]
        if len(present) > 1:
            raise InvalidRequest(f"{present[0]}: {present[1]} is stored too; remove one of them", field="model")
        needed = role in (CODES, SCALES, SHAPE) or (role == ZEROS and scheme.zeros)
        if needed and not present:
            raise InvalidRequest(
                f"{module}.{options[0]} is missing, with which {module} is stored as {scheme}; the checkpoint is"
                " incomplete: fetch it again",
                field="model",
            )
        if present and not needed and not _may_have(role, scheme):
            raise InvalidRequest(
                f"{present[0]} has no meaning for {module}, which config.json describes as {scheme}; {_FIX}",
                field="model",
            )
        if present:
            names[role] = present[0]
    codes = stored[names[CODES]]
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise _wrong_shape(names[CODES], codes, scheme, "two dimensions")
    if scheme.block is None:
        scheme = replace(scheme, block=_block_of(names[SCALES], stored[names[SCALES]], codes, scheme))
    shape, parts = _LAYOUTS[scheme.layout](scheme, codes, names)
    for part in parts:
        _check(part, stored[part.name], scheme)
    return QuantizedTensor(scheme, shape, names)


def _may_have(role: str, scheme: Scheme) -> bool:
    """Return whether a weight of ``scheme`` may have the part ``role``, which it does not need."""
    return scheme.ordered if role == ORDER else scheme.kind == "int"


def _block_of(name: str, scales: StoredTensor, codes: StoredTensor, scheme: Scheme) -> tuple[int, int]:
    """Return the block of a weight by the shape of its ``scales``."""
    rows = codes.shape[0]
    if scales.shape in ((), (1,), (1, 1)):
        return ALL, ALL
    if scales.shape in ((rows,), (rows, 1)):
        return 1, ALL
    raise _wrong_shape(name, scales, scheme, f"[1] or [{rows}, 1] without weight_block_size in quantization_config")


def _plain(scheme: Scheme, codes: StoredTensor, names: Mapping[str, str]) -> tuple[tuple[int, ...], list[StoredPart]]:
    rows, columns = codes.shape
    parts = [StoredPart(names[CODES], (_FP8 if scheme.kind == "float" else _INT8,), (codes.shape,))]
    return (rows, columns), [*parts, *_block_parts(scheme, rows, columns, names, (_INT8,))]


def _packed(scheme: Scheme, codes: StoredTensor, names: Mapping[str, str]) -> tuple[tuple[int, ...], list[StoredPart]]:
    rows, words = codes.shape
    factor = _WORD // scheme.bits
    columns = words * factor
    parts = [StoredPart(names[CODES], ("I32",), (codes.shape,)), StoredPart(names[SHAPE], _INTEGERS, ((2,),))]
    parts += _block_parts(scheme, rows, columns, names, ())
    if ZEROS in names:
        _, blocks = _blocks(scheme, rows, columns)
        parts = [part for part in parts if part.name != names[ZEROS]]
        parts.append(StoredPart(names[ZEROS], ("I32",), ((-(-rows // factor), blocks),)))
    return (rows, columns), parts


def _gptq(scheme: Scheme, codes: StoredTensor, names: Mapping[str, str]) -> tuple[tuple[int, ...], list[StoredPart]]:
    words, rows = codes.shape
    factor = _WORD // scheme.bits
    return _transposed(scheme, rows, words * factor, -(-rows // factor), codes, names)


def _awq(scheme: Scheme, codes: StoredTensor, names: Mapping[str, str]) -> tuple[tuple[int, ...], list[StoredPart]]:
    columns, words = codes.shape
    return _transposed(scheme, words * (_WORD // scheme.bits), columns, words, codes, names)


def _transposed(
    scheme: Scheme, rows: int, columns: int, zero_words: int, codes: StoredTensor, names: Mapping[str, str]
) -> tuple[tuple[int, ...], list[StoredPart]]:
    _, blocks = _blocks(scheme, rows, columns)
    parts = [
        StoredPart(names[CODES], ("I32",), (codes.shape,)),
        StoredPart(names[SCALES], _FLOAT_SCALES, ((blocks, rows),)),
        StoredPart(names[ZEROS], ("I32",), ((blocks, zero_words),)),
    ]
    if ORDER in names:
        parts.append(StoredPart(names[ORDER], _INTEGERS, ((columns,),)))
    return (rows, columns), parts


# Return the shape of a weight, and its parts as they must be.
_LAYOUTS: dict[str, Callable[[Scheme, StoredTensor, Mapping[str, str]], tuple[tuple[int, ...], list[StoredPart]]]] = {
    "plain": _plain,
    "packed": _packed,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
}


def _block_parts(
    scheme: Scheme, rows: int, columns: int, names: Mapping[str, str], zeros: tuple[str, ...]
) -> list[StoredPart]:
    """Return the scales, zeros (of the dtypes ``zeros``) and order of a weight that is not stored transposed."""
    blocks = _blocks(scheme, rows, columns)
    shapes = [blocks]
    if blocks[1] == 1:
        shapes.append((blocks[0],))
    if blocks == (1, 1):
        shapes.append(())
    parts = [StoredPart(names[SCALES], _FLOAT_SCALES, tuple(shapes))]
    if ZEROS in names:
        parts.append(StoredPart(names[ZEROS], zeros, tuple(shapes)))
    if ORDER in names:
        parts.append(StoredPart(names[ORDER], _INTEGERS, ((columns,),)))
    return parts


def _blocks(scheme: Scheme, rows: int, columns: int) -> tuple[int, ...]:
    """Return the numbers of blocks along both dimensions."""
    block = scheme.block or (ALL, ALL)
    return tuple(
        1 if size == ALL else -(-elements // size) for elements, size in zip((rows, columns), block, strict=True)
    )


def _mxfp4(weight: str, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> QuantizedTensor:
    """Return the experts of a layer. The stored tensor has a row for each output, the weight a row for each input."""
    names = {CODES: f"{weight}{_BLOCKS}", SCALES: f"{weight}_scales"}
    if names[SCALES] not in stored:
        raise InvalidRequest(
            f"{names[SCALES]} is missing, with which {weight} is stored as {scheme}; the checkpoint is incomplete:"
            " fetch it again",
            field="model",
        )
    codes = stored[names[CODES]]
    if len(codes.shape) != 4 or 0 in codes.shape or codes.shape[3] * 2 != MXFP4_BLOCK:
        raise _wrong_shape(names[CODES], codes, scheme, "[experts, outputs, inputs / 32, 16]")
    experts, outputs, groups, _ = codes.shape
    _check(StoredPart(names[CODES], ("U8",), (codes.shape,)), codes, scheme)
    _check(StoredPart(names[SCALES], ("U8", "F8_E8M0"), ((experts, outputs, groups),)), stored[names[SCALES]], scheme)
    return QuantizedTensor(scheme, (experts, groups * MXFP4_BLOCK, outputs), names)


def _check(part: StoredPart, stored: StoredTensor, scheme: Scheme) -> None:
    """Raise ``InvalidRequest`` if ``stored`` is not as ``part`` says."""
    if stored.dtype not in part.dtypes:
        raise InvalidRequest(
            f"{part.name} has dtype {stored.dtype}; expected {' or '.join(part.dtypes)} for {scheme}; {_FIX}",
            field="model",
        )
    if stored.shape not in part.shapes:
        raise _wrong_shape(part.name, stored, scheme, " or ".join(str(list(shape)) for shape in part.shapes))


def _wrong_shape(name: str, stored: StoredTensor, scheme: Scheme, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has shape {list(stored.shape)}; expected {expected} for {scheme}; {_FIX}", field="model"
    )
