"""Rewrites JSON Schemas so that llguidance enforces them exactly.

Keywords that it enforces too weakly get additional restrictions. Random tests with llguidance 1.9.1 found seconds of
60, the 29th of any February, hostnames of any length, and the bound itself where an open range lies within two
neighbouring integers. Keywords that it does not support are removed where they restrict nothing: it would reject
``uniqueItems: false``.
"""

import json
from collections.abc import Callable
from typing import Any, TypeGuard

from services.common.errors import InvalidRequest

Schema = Any  # an object, or true or false

# keywords whose values are schemas by name, and keywords whose values are never schemas
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_VALUES = frozenset({"const", "enum", "default", "examples", "required", "dependentRequired", "x-guidance"})

_APPLICATORS = ("properties", "$ref", "anyOf", "oneOf")
_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"})

# keywords that llguidance does not support, and the values with which they restrict nothing
_NEUTRAL = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
    "$recursiveAnchor": (False,),
}

_YEAR = r"([1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"  # there is no year 0000
_LEAP = r"(\d{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = rf"^({_YEAR}-(0[13-9]|1[0-2])-|{_YEAR}-02-([01]|2[0-8])|{_LEAP}-02-29)"
_PATTERNS = {
    "date": (_DAY, f"^{_YEAR}"),
    "date-time": (_DAY, f"^{_YEAR}", "^.{17}[0-5]"),
    "time": ("^.{6}[0-5]",),
}
_LONGEST_HOSTNAME = 253
_BOUNDS = (("exclusiveMinimum", "minimum", max, 1), ("exclusiveMaximum", "maximum", min, -1))


def read_schema(text: str) -> dict[str, Any]:
    """Return the schema in ``text`` as an object, because ``true`` cannot have options.

    Raises ``InvalidRequest`` for another value, ``ValueError`` for invalid JSON, ``RecursionError`` if it is nested too
    deeply.
    """
    schema = json.loads(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("the schema must be a JSON object, or true")
    return schema


def tightened(schema: Schema) -> Schema:
    """Return ``schema`` with explicit restrictions, closed objects where that is safe, and without neutral keywords.

    Raises ``RecursionError`` if it is nested too deeply.
    """
    return _changed(closed(schema), _tighten)


def closed(schema: Schema) -> Schema:
    """Return ``schema`` with ``additionalProperties: false`` in objects that do not define it.

    Otherwise models invent further properties, and few authors who omit the keyword want that. A schema that merges
    others (such as with ``allOf``) is not changed, since each part may define properties of the object.
    """
    merged = []
    _changed(schema, lambda part: merged.append("allOf" in part or sum(name in part for name in _APPLICATORS) > 1))
    return schema if any(merged) else _changed(schema, _close)


def _changed(schema: Schema, change: Callable[[dict[str, Any]], object]) -> Schema:
    """Return a copy with ``change`` applied to each object that is a schema, inner schemas first."""
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            copy[name] = {key: _changed(part, change) for key, part in value.items()}
        elif name not in _VALUES:
            parts = isinstance(value, list)
            copy[name] = [_changed(part, change) for part in value] if parts else _changed(value, change)
        else:
            copy[name] = value
    change(copy)
    return copy


def _close(schema: dict[str, Any]) -> None:
    named, needed = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(needed, list) or _OTHERS & schema.keys():
        return
    if all(isinstance(name, str) and name in named for name in needed):
        schema["additionalProperties"] = False


def _tighten(schema: dict[str, Any]) -> None:
    _remove_neutral(schema)
    _tighten_format(schema)
    _tighten_bounds(schema)


def _remove_neutral(schema: dict[str, Any]) -> None:
    for name, values in _NEUTRAL.items():
        given = schema.get(name)
        if any(type(given) is type(value) and given == value for value in values):  # 0 is not false
            del schema[name]
    for name in ("minContains", "maxContains"):
        if "contains" not in schema and type(schema.get(name)) is int:
            del schema[name]
    _remove_conditions(schema)


def _remove_conditions(schema: dict[str, Any]) -> None:
    """Remove ``then`` and ``else`` without ``if``, and ``if`` without ``then`` and ``else``."""
    given = [name for name in ("if", "then", "else") if isinstance(schema.get(name), dict | bool)]
    if "if" not in schema or all(schema.get(name, True) in (True, {}) for name in ("then", "else")):
        for name in given:
            del schema[name]


def _tighten_format(schema: dict[str, Any]) -> None:
    form = schema.get("format")
    if not isinstance(form, str):
        return
    both = schema.get("allOf", [])
    if form in _PATTERNS and isinstance(both, list):
        schema["allOf"] = [*both, *({"pattern": pattern} for pattern in _PATTERNS[form])]
    elif form == "hostname":
        longest = schema.get("maxLength", _LONGEST_HOSTNAME)
        if isinstance(longest, int):
            schema["maxLength"] = min(longest, _LONGEST_HOSTNAME)


def _tighten_bounds(schema: dict[str, Any]) -> None:
    """Replace exclusive integer bounds of numbers by inclusive bounds with a tiny offset."""
    if schema.get("type") == "integer":
        return
    for open_end, closed, narrower, inwards in _BOUNDS:
        bound, other = schema.get(open_end), schema.get(closed)
        if not _is_number(bound) or bound != bound or abs(bound) > 1e15 or bound != int(bound):
            continue
        moved = bound + inwards * min(0.5, max(1e-9, abs(bound) * 1e-12))  # still allows the next integer
        del schema[open_end]
        schema[closed] = narrower(moved, other) if _is_number(other) else moved


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether ``value`` is a number. Booleans are not."""
    return type(value) in (int, float)
