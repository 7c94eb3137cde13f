"""Patterns of module names in ``config.json``, which are untrusted: matching takes linear time."""

import reprlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from pydantic_core import SchemaError, SchemaValidator, core_schema

from services.common.errors import InvalidRequest

_LONGEST = 1024  # characters of a regular expression
MOST_PATTERNS = 256  # regular expressions; published checkpoints have about ten
MOST_NAMES = 1 << 17
_MOST_PARTS = 24  # of a name that are compared; published names have up to ten


class NamePattern(Protocol):
    """A set of names of modules."""

    def matches(self, module: str) -> bool:
        """Return whether the set contains ``module``."""


class AnyName:
    """All names."""

    def matches(self, module: str) -> bool:
        """Return true."""
        return True


class ExactNames:
    """The listed names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def matches(self, module: str) -> bool:
        """Return whether ``module`` is listed."""
        return module in self._names


class PartialNames:
    """Names that contain a listed sequence of parts between dots, such as ``mlp.gate`` in ``layers.0.mlp.gate``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def matches(self, module: str) -> bool:
        """Return whether ``module`` contains a listed name."""
        return any(run in self._names for run in _runs(module.split(".")))


class RegularExpression:
    """Names whose beginning a regular expression matches.

    The engine is that of Rust, which pydantic has. It has no look-around and no references, and needs linear time.
    """

    def __init__(self, key: str, text: str) -> None:
        """``key`` is the field of ``quantization_config`` that has the expression. Raises ``InvalidRequest``."""
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"it has more than {_LONGEST:,} characters")
            schema = core_schema.str_schema(pattern=f"^(?:{text})", regex_engine="rust-regex")
            self._validator = SchemaValidator(schema)
        except (SchemaError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1].strip().removeprefix("error: ")
            raise InvalidRequest(
                f"config.json: quantization_config.{key}: the regular expression {reprlib.repr(text)} is not supported:"
                f" {reason[:200]}; choose another checkpoint",
                field="model",
            ) from error

    def matches(self, module: str) -> bool:
        """Return whether the expression matches the beginning of ``module``."""
        return self._validator.isinstance_python(module)


def check_count(key: str, count: int, most: int) -> None:
    """Raise ``InvalidRequest`` if ``key`` of ``quantization_config`` has more than ``most`` names or expressions."""
    if count > most:
        raise InvalidRequest(
            f"config.json: quantization_config.{key} has {count:,} entries; at most {most:,} are read: choose another"
            " checkpoint",
            field="model",
        )


def _runs(parts: list[str]) -> Iterator[str]:
    """Yield each sequence of neighbouring parts of a name, joined by dots."""
    parts = parts[:_MOST_PARTS]
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])
