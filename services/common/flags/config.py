"""The base of every config, and how it is made from values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from services.common.flags.errors import FlagError
from services.common.flags.rules import Rule
from services.common.flags.values import as_text

Examples = tuple[tuple[str, str], ...]  # arguments, and their effect


@dataclass(frozen=True)
class Translation:
    """A flag of another program that is accepted: the flags it stands for, and what happens instead of it."""

    meaning: str  # the counterpart, or what happens instead; for the reader of a note and of the documentation
    to: Callable[[str], Mapping[str, str]]  # value -> flags of this program. Raises ValueError with the reason
    counterpart: str | None = None  # the flag it stands for; None = it has none
    silent: bool = False  # no note is printed

    def note(self, name: str, value: str) -> str | None:
        """Return the line to print when ``name=value`` was given, or None if the flag takes effect."""
        if self.counterpart is not None or self.silent:
            return None
        return f"flag {name}={value} of the original Tokasaurus has no effect: {self.meaning}"


class Config(BaseModel):
    """Base of every config and of every group of flags: frozen, no unknown fields.

    A program's config is composed of groups, each of which extends this class alone. The docstring of a group is its
    heading in the usage. A flag has the name of its field, or the field's alias.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    examples: ClassVar[Examples] = ()  # for the usage
    positional: ClassVar[tuple[str, ...]] = ()  # flags whose names may be left out, in this order
    shorthands: ClassVar[Mapping[str, str]] = {}  # arguments that stand for another one
    refused: ClassVar[Mapping[str, str]] = {}  # flags of other programs that this one does not take, and why
    translations: ClassVar[Mapping[str, Translation]] = {}  # flags of another program that it accepts
    suggestions: ClassVar[Mapping[str, str]] = {}  # flags of other programs, and the flag to use instead of each
    # Environment variables that set each flag, the first that is set wins. None: TOKA_<FLAG> for every flag.
    variables: ClassVar[Mapping[str, tuple[str, ...]] | None] = None

    @classmethod
    def fields_by_flag(cls) -> dict[str, FieldInfo]:
        """Return the field of each flag by the flag's name."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def known(cls) -> list[str]:
        """Return the names of all flags: its own, those it refuses, then those it accepts from another program."""
        own = cls.fields_by_flag()
        accepted = cls.translations.items()
        names = [name for name, each in accepted if each.counterpart is None or each.counterpart in own]
        return [*own, *cls.refused, *names]

    def part(self, kind: type["C"]) -> "C":
        """Return the flags of ``kind`` that this config has; others have their defaults. Nothing is checked again."""
        return kind.model_construct(**{name: value for name, value in self if name in kind.model_fields})

    def changed(self) -> dict[str, str]:
        """Return the flags that do not have their defaults, as text of a command line."""
        fields = type(self).model_fields
        return {name: as_text(value) for name, value in self if value not in (None, fields[name].default)}

    @model_validator(mode="after")
    def _keeps_the_rules_of_its_flags(self) -> Self:
        for name, field in type(self).model_fields.items():
            for rule in field.metadata:
                if isinstance(rule, Rule):
                    rule.check(self, name)
        return self


C = TypeVar("C", bound=Config)


def build(kind: type[C], values: Mapping[str, Any]) -> C:
    """Validate ``values`` into a config. Raises ``FlagError`` that names the flag, its value and what was expected."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise FlagError("; ".join(_describe(problem) for problem in error.errors())) from error


def _describe(problem: Any) -> str:
    message: str = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = problem["loc"][0]
    if problem["type"] == "missing":
        return f"flag {name} is missing: write {name}=VALUE"
    given = repr(problem["input"])
    given = given if len(given) <= 100 else f"{given[:97]}..."
    return f"flag {name}={given}: {message[0].lower()}{message[1:]}"
