"""The forms in which a rank stores the matrices of layers that are quantized in the checkpoint.

Only on CUDA: CPUs convert quantized weights to the model's dtype.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from services.common.model.quantized.scheme import ALL, Scheme
from services.worker.described.checkpoint import checkpoint_tensors, layer_shapes
from services.worker.described.config import ModelConfig
from services.worker.described.heads import query_order, value_order
from services.worker.described.naming import Part
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config

FP8_BLOCK = 128  # rows and columns of a block that shares a scale
GROUP_MULTIPLE = 32  # of the inputs that share a scale of integer weights
FP8_MULTIPLE = 16  # of the sizes of a matrix in fp8
_MATRIX = 2  # dimensions


class WeightForm(NamedTuple):
    """The format of the matrices of a layer: the model's dtype, or quantized as the checkpoint has them.

    With ``mxfp4``, these are the experts, and the other matrices are in the model's dtype.
    """

    kind: Literal["dtype", "fp8", "fp8_blocks", "grouped", "mxfp4"]
    bits: int = 0  # of a value, if ``grouped`` or ``mxfp4``
    group: int = ALL  # inputs that share a scale, if ``grouped`` or ``mxfp4``
    offsets: bool = False  # groups have a zero point, if ``grouped``
    ordered: bool = False  # inputs that share a scale need not be neighbours (act-order), if ``grouped``


IN_DTYPE = WeightForm("dtype")
EXPERT_PREFIX = "mlp.experts."  # of the names of experts inside a layer


class LayerForm(NamedTuple):
    """The form of a layer, and if it is the model's dtype, why its quantized weights are converted."""

    form: WeightForm
    scheme: Scheme | None = None  # of the checkpoint; None = it is not quantized
    reason: str = ""


def layer_forms(model: ModelConfig, ranks: Ranks, layers: range) -> list[LayerForm]:
    """Return the form of each of ``layers`` of the whole model ``model`` on one of ``ranks``."""
    if model.quantization is None:
        return [LayerForm(IN_DTYPE)] * len(layers)
    matrices = _stored_matrices(model)
    return [_layer_form(model, ranks, index, matrices[index]) for index in layers]


class _Stored(NamedTuple):
    """The form in which a checkpoint has a matrix."""

    scheme: Scheme | None  # None = it is not quantized
    alone: bool  # it is a tensor of its own, as the model has it
    expert: bool  # it belongs to an expert of a mixture


@lru_cache(maxsize=4)  # a mixture of experts has many names, each of which is compared with all patterns
def _stored_matrices(model: ModelConfig) -> list[list[_Stored]]:
    """Return the different forms of the matrices of each layer in the checkpoint, in the order of their names."""
    assert model.quantization is not None
    found: list[dict[_Stored, None]] = [{} for _ in model.layers]
    for name, stored in checkpoint_tensors(model).items():
        for part in stored.parts:
            own = part.name.split(".")
            if own[:2] != ["model", "layers"] or own[-1] != "weight" or not own[-2].endswith("_proj"):
                continue
            scheme = model.quantization.scheme_of(name.removesuffix(".weight"))
            alone = stored.parts == (Part(part.name),)
            found[int(own[2])][_Stored(scheme, alone, EXPERT_PREFIX in part.name)] = None
    return [list(each) for each in found]


def _layer_form(model: ModelConfig, ranks: Ranks, index: int, matrices: list[_Stored]) -> LayerForm:
    named = next((each.scheme for each in matrices if each.scheme is not None), None)
    if named is None:
        return LayerForm(IN_DTYPE)
    form = _form(named)
    if isinstance(form, str):
        return LayerForm(IN_DTYPE, named, form)
    experts_only = form.kind == "mxfp4"
    if {each.scheme for each in matrices if each.expert or not experts_only} != {named}:
        what = "experts of the layer are in MXFP4" if experts_only else "matrices of a layer are quantized alike"
        return LayerForm(IN_DTYPE, named, f"not all {what}")
    # Quantizing the values of MXFP4 again does not change them, so they may be parts of a tensor.
    if not experts_only and not all(each.alone for each in matrices):
        return LayerForm(IN_DTYPE, named, "the checkpoint has several matrices in one tensor")
    plain = list(range(model.head_dim))
    if query_order(model) != plain or value_order(model) != plain or model.residual_multiplier != 1:
        return LayerForm(IN_DTYPE, named, "the values of this architecture are changed when they are read")
    local = local_config(model, ranks, range(index, index + 1))
    if problem := _unsupported(local, form, ranks):
        return LayerForm(IN_DTYPE, named, problem)
    return LayerForm(form, named)


def _form(scheme: Scheme) -> WeightForm | str:
    """Return the form of a matrix of ``scheme``, or why there is none."""
    rows, columns = (1, ALL) if scheme.block is None else scheme.block
    if scheme.layout == "mxfp4":
        return WeightForm("mxfp4", scheme.bits, columns)
    if scheme.kind == "float":
        if columns == ALL and rows in (ALL, 1):
            return WeightForm("fp8")
        if (rows, columns) == (FP8_BLOCK, FP8_BLOCK):
            return WeightForm("fp8_blocks")
        return f"products in fp8 need one scale per tensor or row, or for blocks of {FP8_BLOCK} x {FP8_BLOCK}"
    if rows not in (ALL, 1) or columns % GROUP_MULTIPLE:
        return f"groups must have a multiple of {GROUP_MULTIPLE} inputs of one output"
    offsets, ordered = scheme.zeros and not scheme.symmetric, scheme.act_order and columns != ALL
    return WeightForm("grouped", scheme.bits, columns, offsets, ordered)


def _unsupported(local: ModelConfig, form: WeightForm, ranks: Ranks) -> str | None:
    """Return why a rank cannot store its share ``local`` of a layer in ``form``, or None."""
    shapes = layer_shapes(local, local.layers[0])
    matrices = {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == _MATRIX and "_proj." in name and (form.kind != "mxfp4" or name.startswith(EXPERT_PREFIX))
    }
    if form.ordered and ranks.tp_size > 1:
        return "inputs that share a scale are not neighbours (act-order), so ranks cannot have shares of them"
    if form.ordered and any(name.startswith(EXPERT_PREFIX) for name in matrices):
        return "inputs of experts that share a scale are not neighbours (act-order)"
    multiples = {
        "fp8": (FP8_MULTIPLE, FP8_MULTIPLE),
        "fp8_blocks": (FP8_BLOCK, FP8_BLOCK),
        "grouped": (1, form.group or GROUP_MULTIPLE),
        "mxfp4": (1, form.group),
    }[form.kind]
    for name, shape in matrices.items():
        for kind, size, multiple in zip(("outputs", "inputs"), shape, multiples, strict=True):
            if size % multiple:
                share = f"a share of {name}" if ranks.tp_size > 1 else name
                return f"{share} has {size} {kind}, not a multiple of {multiple}"
    return None
