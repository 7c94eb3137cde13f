"""Validation of URL query parameters. Raises ``InvalidRequest``, which names the parameter."""

import re
from collections.abc import Sequence

from fastapi import Request

from services.common.errors import InvalidValue

_NUMBER = re.compile(r"[0-9]{1,12}")


class Query:
    """The query parameters of one request."""

    def __init__(self, request: Request) -> None:
        self._values = request.query_params

    def text(self, name: str) -> str | None:
        """Return a parameter, or None if it is missing or empty."""
        value = self._values.get(name) or None
        if value is not None and "\0" in value:  # PostgreSQL rejects NUL
            raise InvalidValue(f"invalid value for {name!r}: it has a NUL character; leave that out", field=name)
        return value

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """Return a whole number from ``least`` to ``most``."""
        value = self.text(name)
        return default if value is None else whole_number(name, value, least, most)

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """Return one of ``choices``. The first is the default."""
        value = self._values.get(name, choices[0])
        if value not in choices:
            raise InvalidValue(
                f"invalid value for {name!r}: expected {' or '.join(choices)} (got {value[:64]!r})", field=name
            )
        return value


def whole_number(name: str, value: str, least: int, most: int) -> int:
    """Return ``value`` as a number from ``least`` to ``most``."""
    if not _NUMBER.fullmatch(value) or not least <= int(value) <= most:
        raise InvalidValue(
            f"invalid value for {name!r}: expected a whole number from {least} to {most} (got {value[:64]!r})",
            field=name,
        )
    return int(value)
