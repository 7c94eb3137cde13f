"""Rules between flags, declared in the type of the flag that they restrict.

``metrics_host: Annotated[str, Needs("metrics_port")]`` is refused while ``metrics_port`` is off. ``Config`` checks all
rules of its fields. A flag that still has its default breaks no rule. A rule about a flag that the program does not
have is not checked.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from services.common.flags.values import as_text, types_of

_OFF = (None, False, 0, "", ())


class Rule(ABC):
    """A condition on the other flags of a program under which a flag has an effect."""

    @abstractmethod
    def broken(self, config: BaseModel) -> str | None:
        """Return why the flag has no effect in ``config`` and what to do, or None if it has one."""

    def check(self, config: BaseModel, name: str) -> None:
        """Raise ``ValueError`` if the flag ``name`` of ``config`` breaks this rule."""
        value = getattr(config, name)
        if value != type(config).model_fields[name].default and (reason := self.broken(config)) is not None:
            raise ValueError(f"flag {name}={as_text(value)}: has no effect {reason}")


class Needs(Rule):
    """Requires that one of the flags ``names`` is on, or is at least ``least`` if that is given.

    ``auto`` counts as on. A flag that the environment variable ``variable`` replaces is on if that is set.
    """

    def __init__(self, *names: str, least: int | None = None, variable: str = "") -> None:
        self.names, self.least, self.variable = names, least, variable

    def broken(self, config: BaseModel) -> str | None:
        fields = type(config).model_fields
        values = [getattr(config, name) for name in self.names if name in fields]
        if not values or any(map(self.is_met_by, values)) or os.environ.get(self.variable):
            return None
        if self.least is not None:
            wanted = " or ".join(f"{name}={self.least}" for name in self.names) + " or more"
        else:
            wanted = " or ".join(f"{name}={'T' if _is_boolean(fields[name].annotation) else ''}" for name in self.names)
        return f"without {wanted}; leave it out, or set {'both' if len(self.names) == 1 else 'one of them'}"

    def is_met_by(self, value: Any) -> bool:
        """Return whether a flag of ``names`` with ``value`` is on."""
        return value == "auto" or (value not in _OFF if self.least is None else value >= self.least)


class Excludes(Rule):
    """Requires that the flags ``names`` are off, and that others do not have their ``values``: one each, or a tuple."""

    def __init__(self, *names: str, **values: Any) -> None:
        self.names, self.values = names, values

    def broken(self, config: BaseModel) -> str | None:
        given = {name: getattr(config, name, None) for name in (*self.names, *self.values)}
        for name, value in given.items():
            excluded = self.values.get(name)
            if name in self.names:
                is_excluded = value not in _OFF
            else:
                is_excluded = value is not None and value in (excluded if isinstance(excluded, tuple) else (excluded,))
            if is_excluded:
                return f"with {name}={as_text(value)}; leave one of them out"
        return None


@dataclass(frozen=True)
class CudaOnly:
    """Marks a flag that only CUDA devices support. It is allowed on a CPU with its default or with F."""

    fix: str = "leave it out"


def cuda_only(config: BaseModel) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and fix of each flag of ``config`` that a CPU does not support."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        for mark in field.metadata:
            if isinstance(mark, CudaOnly) and value is not False and value != field.default:
                yield name, as_text(value), mark.fix


def _is_boolean(annotation: Any) -> bool:
    return bool in types_of(annotation)
