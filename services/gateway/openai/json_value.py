"""Size and depth of JSON values that clients send, such as schemas."""

from collections.abc import Iterator
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator

from services.common.errors import InvalidRequest
from services.common.json_scan import Raw
from services.common.text.grammar_text import MAX_GRAMMAR_BYTES

# Functions that write or change such values are recursive. Python's recursion limit allows about 300 levels.
MAX_DEPTH = 200
_WRITTEN_DEPTH = 254  # maximum number of levels that orjson writes. It reads deeper values.


def json_size(value: Any, most: int) -> int:
    """Return a lower bound of the length of ``value`` as JSON text, in characters. Counting ends beyond ``most``.

    Raises ValueError for a value that is nested too deeply.
    """
    size, level = 0, [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for part in level:
            if isinstance(part, str):
                size += len(part) + 2
            elif isinstance(part, list | dict):
                size += 2 * len(part) + 2
                if size > most:
                    return size
                if isinstance(part, dict):
                    size += sum(map(len, part)) + 4 * len(part)
                deeper.extend(part.values() if isinstance(part, dict) else part)
            else:
                size += len(repr(part))
            if size > most:
                return size
        if not deeper:
            return size
        level = deeper
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep; make it flatter")


def may_be_too_deep(raw: Raw) -> bool:
    """Return whether the value of the JSON text ``raw`` may have more levels than ``write_again`` writes."""
    return raw.count(b"[") + raw.count(b"{") > _WRITTEN_DEPTH


def write_again(value: Any) -> bytes:
    """Return ``value``, which was read from JSON, as JSON. Raises InvalidRequest if it has too many levels."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise InvalidRequest("the body is nested too deeply; make it flatter", reason="INVALID_JSON") from None


def shown(value: Any, most: int) -> str:
    """Return ``repr(value)``, cut to ``most`` characters. The time does not depend on the size of ``value``."""
    text = ""
    for piece in _pieces(value, most):
        text += piece
        if len(text) > most:
            return f"{text[: most - 3]}..."
    return text


def _pieces(value: Any, most: int) -> Iterator[str]:
    """Yield the parts of ``repr(value)``. Long strings are cut to little more than ``most`` characters."""
    if isinstance(value, str):
        yield repr(value[: most + 1])
    elif isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item, most)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield f"{', ' if number else ''}{name[: most + 1]!r}: "
            yield from _pieces(item, most)
        yield "}"
    else:
        yield repr(value)


def check_value(value: Any) -> Any:
    """Return ``value``. Raises ``ValueError`` if it is too deep, or larger than the largest grammar."""
    if json_size(value, MAX_GRAMMAR_BYTES) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"it has more than {MAX_GRAMMAR_BYTES} bytes as text; make it smaller")
    return value


def check_texts(texts: list[str]) -> list[str]:
    """Return ``texts``. Raises ``ValueError`` if they are together larger than the largest grammar."""
    if sum(map(len, texts)) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"the texts have more than {MAX_GRAMMAR_BYTES} bytes together; give fewer, or shorter ones")
    return texts


# Any value in a body, and a JSON Schema. Their size and depth are limited.
BoundedValue = Annotated[Any, AfterValidator(check_value)]
Schema = Annotated[dict[str, Any], AfterValidator(check_value)]
