"""What people are told of a config's flags: the usage and the shells' completion are made of it."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from services.common.flags import Config

BOOLEANS = ("T", "F")


@dataclass(frozen=True)
class Flag:
    """One flag of a program."""

    name: str
    default: str | None  # as on a command line; None = it must be given
    description: str
    choices: tuple[str, ...]  # all values there are, or the words among them; may be empty
    is_text: bool  # any text will do, such as a path
    group: type[Config]  # the config that has it


def flags_of(kind: type[Config]) -> list[Flag]:
    """Every flag that ``kind`` takes: those of its own first, then by group, from the nearest to what all have."""
    lines = [each for each in kind.__mro__ if issubclass(each, Config)]
    flags = [_flag(kind, name, lines) for name in kind.model_fields if name not in kind.never_given]
    return sorted(flags, key=lambda flag: lines.index(flag.group))  # stable


def _flag(kind: type[Config], name: str, lines: list[type[Config]]) -> Flag:
    field = kind.model_fields[name]
    leaves = list(_leaves(field.annotation))
    choices = [str(value) for leaf in leaves if get_origin(leaf) is Literal for value in get_args(leaf)]
    choices += BOOLEANS if bool in leaves else ()
    group = next(each for each in lines if name in each.__annotations__)
    default = None if field.is_required() else as_text(field.get_default())
    return Flag(name, default, field.description or "", tuple(choices), str in leaves and not choices, group)


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that a value may have, lists left out."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _leaves(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _leaves(each)
    else:
        yield annotation


def as_text(value: object) -> str:
    """``value`` as a command line has it; None: empty."""
    match value:
        case None:
            return ""
        case bool():
            return "T" if value else "F"
        case tuple():
            return ",".join(map(str, value))
        case _:
            return str(value)
