"""Names under which a checkpoint stores the tensors of a model, and the tensors that it stores as one.

The model's own names are those of a Llama checkpoint, with ``mlp.gate`` and ``mlp.experts.N`` for a mixture of experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """The part of a stored tensor that is one tensor of the model.

    It is ``stored[rows]``, then every second column from ``first`` on if that is given, then transposed if
    ``transposed``.
    """

    name: str  # of the tensor of the model
    rows: int | slice | None = None  # None = all of the stored tensor
    first: int | None = None  # 0 or 1; None = all columns
    transposed: bool = False


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint."""

    shape: Shape
    parts: tuple[Part, ...]


# Returns the tensors of the checkpoint by name. The argument has the shapes of the model's tensors, by name.
Naming: TypeAlias = Callable[[Mapping[str, Shape]], dict[str, CheckpointTensor]]


def one_to_one(shapes: Mapping[str, Shape]) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint that stores each tensor under the name that the model has for it."""
    return {name: CheckpointTensor(shape, (Part(name),)) for name, shape in shapes.items()}


def renamed(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint that has other names for parts of the model's names.

    ``names`` maps a part of a model's name, such as ``.mlp.``, to the checkpoint's. All parts are replaced, in order.
    """
    stored = {}
    for name, shape in shapes.items():
        other = name
        for own, theirs in names.items():
            other = other.replace(own, theirs)
        stored[other] = CheckpointTensor(shape, (Part(name),))
    return stored


def joined(shapes: Mapping[str, Shape], modules: Mapping[str, tuple[str, ...]]) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint in which one tensor contains the rows of several of the model's.

    ``modules`` maps the name of a stored module, such as ``qkv_proj``, to the model's modules in their order.
    """
    wholes = {member: module for module, members in modules.items() for member in members}
    stored: dict[str, CheckpointTensor] = {}
    for name, shape in shapes.items():
        *path, module, kind = name.split(".")
        if module not in wholes:
            stored[name] = CheckpointTensor(shape, (Part(name),))
            continue
        whole = ".".join((*path, wholes[module], kind))
        before = stored.get(whole, CheckpointTensor((0, *shape[1:]), ()))
        end = before.shape[0] + shape[0]
        part = Part(name, slice(before.shape[0], end))
        stored[whole] = CheckpointTensor((end, *shape[1:]), (*before.parts, part))
    return stored
