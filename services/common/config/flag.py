"""Facts about the flags of a config, from which the usage and the shells' completion are made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from services.common.flags import Config, as_text, types_of

BOOLEANS = ("T", "F")


@dataclass(frozen=True)
class Flag:
    """A flag of a program."""

    name: str
    default: str | None  # as on a command line; None = it must be given
    description: str
    choices: tuple[str, ...]  # all values, or the words among them; may be empty
    is_boolean: bool  # may be given without a value
    is_text: bool  # any text is allowed, such as a path
    group: type[Config]  # the config that has it

    @property
    def option(self) -> str:
        """The name as in ``--name``."""
        return f"--{self.name.replace('_', '-')}"


def flags_of(kind: type[Config]) -> list[Flag]:
    """Return every flag of ``kind``: its own first, then those of each group in the order of the groups."""
    groups = [each for each in kind.__mro__ if issubclass(each, Config)]
    flags = [
        _flag(name, field, next(each for each in groups if field_name in each.__annotations__))
        for (name, field), field_name in zip(kind.fields_by_flag().items(), kind.model_fields, strict=True)
    ]
    return sorted(flags, key=lambda flag: groups.index(flag.group))  # stable


def _flag(name: str, field: FieldInfo, group: type[Config]) -> Flag:
    types = list(types_of(field.annotation))
    choices = [str(value) for each in types if get_origin(each) is Literal for value in get_args(each)]
    choices += BOOLEANS if bool in types else ()
    default = None if field.is_required() else as_text(field.get_default())
    is_text = not choices and (str in types or Path in types)
    return Flag(name, default, field.description or "", tuple(choices), bool in types, is_text, group)
