"""The forms in which a rank stores the matrices of layers that are quantized in the checkpoint.

Only on CUDA, except ``integer_bits`` and ``kept_bits``: CPUs convert other quantized weights to the model's dtype.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, Literal, NamedTuple, TypeVar

from services.common.model.quantized.scheme import ALL, Scheme
from services.worker.described.checkpoint import EMBEDDING, HEAD, checkpoint_tensors, layer_shapes
from services.worker.described.config import ModelConfig
from services.worker.described.heads import query_order, value_order
from services.worker.described.naming import Part
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config

FP8_BLOCK = 128  # rows and columns of a block that shares a scale
GROUP_MULTIPLE = 32  # of the inputs that share a scale of integer weights
FP8_MULTIPLE = 16  # of the sizes of a matrix in fp8
_DIMENSIONS = 2  # of a matrix
_HEAD_BITS, _OFFSET_BITS = 8, 4  # of integers on CPUs: of the head, and of those that have an offset


def integer_bits(scheme: Scheme | None) -> int | None:
    """Return 4 or 8 if CPUs can store weights of ``scheme`` unchanged as integers of that many bits, or None.

    CPUs store groups of 32, a scale in float16, and an offset only with 4 bits.
    """
    if (
        scheme is None
        or scheme.layout != "gguf"
        or scheme.kind != "int"
        or (scheme.zeros and scheme.bits > _OFFSET_BITS)
    ):
        return None
    return scheme.bits


class WeightForm(NamedTuple):
    """The format of a matrix: the model's dtype, or quantized as the checkpoint has it."""

    kind: Literal["dtype", "fp8", "fp8_blocks", "grouped", "mxfp4"]
    bits: int = 0  # of a value, if ``grouped`` or ``mxfp4``
    group: int = ALL  # inputs that share a scale, if ``grouped`` or ``mxfp4``
    offsets: bool = False  # groups have a zero point, if ``grouped``
    ordered: bool = False  # inputs that share a scale need not be neighbours (act-order), if ``grouped``


IN_DTYPE = WeightForm("dtype")
T = TypeVar("T")


class OfLayer(NamedTuple, Generic[T]):
    """A value for each matrix of a layer. Projections of the same input are one matrix."""

    qkv: T
    output: T
    inner: T  # gate and up, of the MLP and of a shared expert
    down: T  # of the MLP and of a shared expert
    experts: T  # all matrices of all experts


MATRICES = OfLayer._fields
_PROJECTIONS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **{"o_proj": "output", "gate_proj": "inner", "up_proj": "inner", "down_proj": "down"},
}
_EXPERT_PREFIX = "mlp.experts."  # of the names of experts inside a layer
_ALL_IN_DTYPE = OfLayer(IN_DTYPE, IN_DTYPE, IN_DTYPE, IN_DTYPE, IN_DTYPE)


class LayerForm(NamedTuple):
    """The forms of the matrices of a layer, and if quantized weights are converted to the model's dtype, why."""

    forms: OfLayer[WeightForm] = _ALL_IN_DTYPE
    schemes: tuple[Scheme, ...] = ()  # of the matrices that stay quantized, without repeats
    converted: tuple[Scheme, ...] = ()  # of the matrices that are converted, without repeats
    reason: str = ""  # why the first of them is converted

    @property
    def kept(self) -> list[WeightForm]:
        """The forms of the matrices that stay quantized, without repeats."""
        return [form for form in dict.fromkeys(self.forms) if form != IN_DTYPE]

    def of(self, name: str) -> WeightForm:
        """Return the form of a tensor by its name inside the layer."""
        matrix = _matrix_of(name)
        form: WeightForm = IN_DTYPE if matrix is None else getattr(self.forms, matrix)
        return form


def layer_forms(model: ModelConfig, ranks: Ranks, layers: range) -> list[LayerForm]:
    """Return the form of each of ``layers`` of the whole model ``model`` on one of ``ranks``."""
    if model.quantization is None:
        return [LayerForm()] * len(layers)
    matrices = _stored_matrices(model)
    return [_layer_form(model, ranks, index, matrices[index]) for index in layers]


def kept_bits(model: ModelConfig) -> int | None:
    """Return 4 or 8 if CPUs can store all matrices of ``model`` unchanged as integers of that many bits, or None.

    The head must be stored in 8 bits.
    """
    if model.quantization is None or _changes_values(model):
        return None
    head = EMBEDDING if model.tied_embeddings else HEAD
    if integer_bits(model.quantization.scheme_of(head.removesuffix(".weight"))) != _HEAD_BITS:
        return None
    matrices = [each for layer in _stored_matrices(model) for each in layer]
    bits = {integer_bits(each.scheme) if each.alone else None for each in matrices}
    return bits.pop() if len(bits) == 1 else None


class _Stored(NamedTuple):
    """The form in which a checkpoint has a part of a matrix."""

    matrix: str  # one of ``MATRICES``
    scheme: Scheme | None  # None = it is not quantized
    alone: bool  # it is a tensor of its own, as the model has it


@lru_cache(maxsize=4)  # a mixture of experts has many names, each of which is compared with all patterns
def _stored_matrices(model: ModelConfig) -> list[list[_Stored]]:
    """Return the different forms of the matrices of each layer in the checkpoint, in the order of their names."""
    assert model.quantization is not None
    found: list[dict[_Stored, None]] = [{} for _ in model.layers]
    for name, stored in checkpoint_tensors(model).items():
        for part in stored.parts:
            own = part.name.split(".", 3)
            matrix = _matrix_of(own[3]) if own[:2] == ["model", "layers"] and part.name.endswith(".weight") else None
            if matrix is None:
                continue
            scheme = model.quantization.scheme_of(name.removesuffix(".weight"))
            found[int(own[2])][_Stored(matrix, scheme, stored.parts == (Part(part.name),))] = None
    return [list(each) for each in found]


def _matrix_of(name: str) -> str | None:
    """Return to which of ``MATRICES`` a tensor belongs, by its name inside the layer, or None."""
    return "experts" if name.startswith(_EXPERT_PREFIX) else _PROJECTIONS.get(name.split(".")[-2])


def _layer_form(model: ModelConfig, ranks: Ranks, index: int, stored: list[_Stored]) -> LayerForm:
    local = local_config(model, ranks, range(index, index + 1))
    mxfp4 = any(each.matrix == "experts" and each.scheme and each.scheme.layout == "mxfp4" for each in stored)
    form = LayerForm()
    for matrix in MATRICES:
        parts = [each for each in stored if each.matrix == matrix]
        schemes = tuple(dict.fromkeys(each.scheme for each in parts if each.scheme is not None))
        # Settings of gpt-oss may include the attention, which is not stored in MXFP4.
        if not schemes or (mxfp4 and matrix != "experts"):
            continue
        found = _matrix_form(model, local, ranks, matrix, parts)
        if isinstance(found, str):
            converted = tuple(dict.fromkeys((*form.converted, *schemes)))
            form = form._replace(converted=converted, reason=form.reason or found)
        else:
            kept = tuple(dict.fromkeys((*form.schemes, *schemes)))
            form = form._replace(forms=form.forms._replace(**{matrix: found}), schemes=kept)
    return form


def _matrix_form(
    model: ModelConfig, local: ModelConfig, ranks: Ranks, matrix: str, parts: list[_Stored]
) -> WeightForm | str:
    """Return the form of a matrix with these ``parts``, or why it is converted. ``local`` is a rank's share."""
    schemes = list(dict.fromkeys(each.scheme for each in parts))
    forms = [IN_DTYPE if scheme is None else _form(scheme) for scheme in schemes]
    if reason := next((form for form in forms if isinstance(form, str)), None):
        return reason
    form = _common_form([form for form in forms if isinstance(form, WeightForm)])
    if form is None or (len(schemes) > 1 and not all(scheme and scheme.name for scheme in schemes)):
        return "not all parts of a matrix are quantized alike"
    if form.kind == "mxfp4" and matrix != "experts":
        return "only experts have products in MXFP4"
    # Quantizing the values of MXFP4 again does not change them, so they may be parts of a tensor.
    if form.kind != "mxfp4" and not all(each.alone for each in parts):
        return "the checkpoint has several matrices in one tensor"
    if _changes_values(model):
        return "the values of this architecture are changed when they are read"
    return _unsupported(local, form, matrix, ranks) or form


def _changes_values(model: ModelConfig) -> bool:
    """Return whether matrices of the checkpoint are changed when they are read."""
    plain = list(range(model.head_dim))
    return query_order(model) != plain or value_order(model) != plain or model.residual_multiplier != 1


def _common_form(forms: Sequence[WeightForm]) -> WeightForm | None:
    """Return the form that stores matrices of all ``forms`` without a change, or None.

    Integers of 8 bits with offsets include those of 4 bits and those without offsets, if their groups are equal.
    """
    if IN_DTYPE in forms:
        return None
    if len(forms) == 1:
        return forms[0]
    bits, offsets = max(form.bits for form in forms), any(form.offsets for form in forms)
    common = {form._replace(bits=bits, offsets=offsets) for form in forms}
    form = forms[0]._replace(bits=bits, offsets=offsets)
    return form if common == {form} and form.kind == "grouped" and not form.ordered else None


def _form(scheme: Scheme) -> WeightForm | str:
    """Return the form of a matrix of ``scheme``, or why there is none."""
    if scheme.kind == "other":
        return f"there is no product for blocks of the type {scheme}"
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


def _unsupported(local: ModelConfig, form: WeightForm, matrix: str, ranks: Ranks) -> str | None:
    """Return why a rank cannot store its share of ``matrix`` in ``form``, or None. ``local`` is its share."""
    if form.ordered and ranks.tp_size > 1:
        return "inputs that share a scale are not neighbours (act-order), so ranks cannot have shares of them"
    if form.ordered and matrix == "experts":
        return "inputs of experts that share a scale are not neighbours (act-order)"
    multiples = {
        "fp8": (FP8_MULTIPLE, FP8_MULTIPLE),
        "fp8_blocks": (FP8_BLOCK, FP8_BLOCK),
        "grouped": (1, form.group or GROUP_MULTIPLE),
        "mxfp4": (1, form.group),
    }[form.kind]
    for name, shape in layer_shapes(local, local.layers[0]).items():
        if _matrix_of(name) != matrix or len(shape) != _DIMENSIONS:
            continue
        for kind, size, multiple in zip(("outputs", "inputs"), shape, multiples, strict=True):
            if size % multiple:
                share = f"a share of {name}" if ranks.tp_size > 1 else name
                return f"{share} has {size} {kind}, not a multiple of {multiple}"
    return None
