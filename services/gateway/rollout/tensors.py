"""Tensors of new weights, as bodies describe them."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from services.common.errors import InvalidRequest
from tokasaurus.common.v1 import weights_pb2

# torch's names of dtypes, and those of safetensors.
_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}

Names = Annotated[list[str], Field(description="Names of the tensors, as in the checkpoint, in their order.")]
DtypeNames = Annotated[list[str], Field(description="Dtypes of the same tensors, as torch names them.")]
Shapes = Annotated[
    list[list[Annotated[int, Field(ge=0, lt=2**63)]]], Field(description="Shapes of the same tensors, in elements.")
]


def described(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], field: str
) -> list[weights_pb2.UploadedTensor]:
    """Return the descriptions of tensors. ``field`` is the path of ``dtypes``. Raises ``InvalidRequest``."""
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: expected one of each for every tensor",
            field=f"{field[: field.rfind('.') + 1]}names",
        )
    found = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if (known := _DTYPES.get(dtype.removeprefix("torch."))) is None:
            expected = ", ".join(_DTYPES)
            raise InvalidRequest(f"{name[:256]} has dtype {dtype[:64]!r}: expected one of {expected}", field=field)
        found.append(weights_pb2.UploadedTensor(name=name, dtype=known, shape=shape))
    return found
