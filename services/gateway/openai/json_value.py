"""JSON that clients make up, such as schemas: how large it is, and how deep, found without writing it."""

from collections.abc import Iterator
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.common.text.grammar_text import MAX_GRAMMAR_BYTES

# Python's own recursion, which writes and changes such values, ends at some 300 levels of them.
MAX_DEPTH = 200


def json_size(value: Any, most: int) -> int:
    """Characters that ``value`` has at least as JSON text; counting ends beyond ``most``. ``ValueError`` where it is
    nested too deeply."""
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


def write_again(value: Any) -> bytes:
    """``value``, which was read from JSON, as JSON. It may have more levels than can be written: ``InvalidRequest``."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise InvalidRequest("the body is nested too deeply; make it flatter", reason="INVALID_JSON") from None


def shown(value: Any, most: int) -> str:
    """Return the beginning of ``repr(value)``, in ``most`` characters, however large or deep ``value`` is."""
    text = ""
    for piece in _pieces(value, most):
        text += piece
        if len(text) > most:
            return f"{text[: most - 3]}..."
    return text


def _pieces(value: Any, most: int) -> Iterator[str]:
    """Yield the parts of ``repr(value)``, of which no text is longer than ``most`` by much."""
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


def check_schema(schema: Any) -> None:
    """Raise ``ValueError`` for a schema that is too deep, or larger than any grammar may be."""
    if json_size(schema, MAX_GRAMMAR_BYTES) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"it has more than {MAX_GRAMMAR_BYTES} bytes as text; give a smaller schema")


def check_texts(texts: list[str]) -> None:
    """Raise ``ValueError`` for texts that are together larger than any grammar may be."""
    if sum(map(len, texts)) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"the texts have more than {MAX_GRAMMAR_BYTES} bytes together; give fewer, or shorter ones")
