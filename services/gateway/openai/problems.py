"""Validation errors as sentences that name the parameter, the allowed values, and the given value."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.common.errors import InvalidRequest, InvalidValue
from services.gateway.openai.json_value import shown

# Steps of pydantic's paths that stand for a branch of a union and not for a parameter.
_UNION_STEPS = (
    "str",
    "list[TextPart]",
    "list[InputPart]",
    "NamedTool",
    "NamedFunctionTool",
    "NamedResponseTool",
    "AllowedTools",
    "AllowedResponseTools",
    "dict[str,any]",
    "constrained-str",
    "literal['none','auto','required']",
)
# Beginnings of the steps that are tags of unions or validators.
_MARKS = ("#", "function-")
# Descriptions of the allowed values, by pydantic's type of an error. Its context has the values of the placeholders.
_TYPES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a string",
}
_RANGES = {
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_parsing_size": "a smaller whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "string_pattern_mismatch": "text that matches the pattern {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
    "union_tag_invalid": "one of {expected_tags}",
}


def describe(error: ValidationError, given: Mapping[str, str]) -> InvalidRequest:
    """Return the first error of a body. ``given``: names that the client used for fields, by field."""
    # Each branch of a union has errors. The client meant the branch that got furthest: past a whole list, or deepest.
    problems = error.errors(include_url=False)
    problem = max(problems, key=lambda problem: (problem["type"] == "too_long", len(problem["loc"])))
    field = _path(_renamed(problem["loc"], given))
    message = problem["msg"].removeprefix("Value error, ")
    if not field:  # a rule about several fields, whose message begins with the field
        field, _, message = message.partition(": ")
        field = given.get(field, field)
    if problem["type"] == "missing":
        return InvalidRequest(f"missing required parameter: {field!r}", field=field, reason="MISSING_PARAMETER")
    alternatives = [each for each in problems if _path(_renamed(each["loc"], given)) == field]
    message = _expected(problem, alternatives) or f"{message[:1].lower()}{message[1:]}"
    got = "" if problem["loc"] == () else f" (got {_short(problem['input'])})"
    return InvalidValue(f"invalid value for {field!r}: {message}{got}", field=field)


def _expected(problem: ErrorDetails, alternatives: Iterable[ErrorDetails]) -> str:
    """Return "expected ...", with each type that a union allows, or an empty string for a rule of this server."""
    if problem["type"] in _RANGES:
        allowed_range = _RANGES[problem["type"]].format_map(_written(problem.get("ctx", {})))
        return f"expected {allowed_range}".replace(" 1 items", " 1 item").replace(" 1 characters", " 1 character")
    allowed = dict.fromkeys(phrase for each in alternatives if (phrase := _phrase(each)))
    if _phrase(problem) and allowed:
        return f"expected {' or '.join(allowed)}"
    return "" if problem["type"] in ("value_error", "missing") else problem["msg"].replace("Input should", "it should")


def _phrase(problem: ErrorDetails) -> str:
    if problem["type"] == "literal_error":
        return str(problem.get("ctx", {})["expected"])
    return _TYPES.get(problem["type"], "")


def _written(context: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of an error's context as text, without the # at the beginning of tags."""
    return {
        name: f"{value:g}" if isinstance(value, float) else str(value).replace("'#", "'")
        for name, value in context.items()
    }


def _renamed(steps: tuple[int | str, ...], given: Mapping[str, str]) -> tuple[int | str, ...]:
    return (given.get(str(steps[0]), steps[0]), *steps[1:]) if steps else steps


def _path(steps: tuple[int | str, ...]) -> str:
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _UNION_STEPS and step != "[key]" and not step.startswith(_MARKS):
            path += f".{step}" if path else step
    return path


def _short(value: Any) -> str:
    if isinstance(value, (str, list, dict)) and len(value) > 64:
        return f"{type(value).__name__} of length {len(value)}"
    return shown(value, 64)
