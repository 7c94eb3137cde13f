"""Types of flag values: booleans ``T`` and ``F``, lists with commas, and arithmetic in parentheses.

Arithmetic (``kv_cache_num_tokens='(512 * 1024)'``) is evaluated over an AST of numbers and operators only.
"""

import ast
import operator
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator

BOOLEAN_WORDS = {"t": True, "true": True, "1": True, "f": False, "false": False, "0": False}

_Operator = Callable[..., int | float]
_OPERATORS: dict[type[ast.operator | ast.unaryop], _Operator] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_LARGEST = 2**63


def _evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _evaluate(left), _evaluate(right)
            if not 0 <= exponent <= 63:
                raise ValueError("an exponent must be 0 to 63")
            value = base**exponent
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(operand))
        case _:
            raise ValueError("only numbers and + - * / // % ** are allowed in parentheses")
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("the result is too large, or no number")
    return value


def arithmetic(value: Any) -> Any:
    """Return the number that text in parentheses stands for: 524288 for ``'(512 * 1024)'``.

    Returns anything else unchanged. Raises ``ValueError``.
    """
    if not (isinstance(value, str) and value.strip().startswith("(")):
        return value
    try:
        result = _evaluate(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot be evaluated: {error}") from error
    return int(result) if isinstance(result, float) and result.is_integer() else result


def true_false(value: Any) -> Any:
    """Return the boolean that ``T``, ``F``, ``true``, ``false``, ``1`` or ``0`` stands for. Raises ``ValueError``."""
    if isinstance(value, bool):
        return value
    if str(value).lower() not in BOOLEAN_WORDS:
        raise ValueError("expected T or F")
    return BOOLEAN_WORDS[str(value).lower()]


def _comma_list(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _number_or_auto(value: Any) -> Any:
    value = arithmetic(value)
    try:
        return value if value == "auto" else int(value)
    except (TypeError, ValueError):
        raise ValueError("expected a whole number, or auto") from None


def _true_false_or_auto(value: Any) -> Any:
    try:
        return value if value == "auto" else true_false(value)
    except ValueError:
        raise ValueError("expected T, F or auto") from None


Int = Annotated[int, BeforeValidator(arithmetic)]
AutoInt = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
Float = Annotated[float, BeforeValidator(arithmetic)]
Bool = Annotated[bool, BeforeValidator(true_false)]
AutoBool = Annotated[bool | Literal["auto"], BeforeValidator(_true_false_or_auto)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_comma_list)]
Ints = Annotated[tuple[int, ...], BeforeValidator(_comma_list)]


def within(least: int, most: int | None = None) -> AfterValidator:
    """Return the check that an ``AutoInt`` is auto, or a number from ``least`` to ``most``."""

    def check(value: int | Literal["auto"]) -> int | Literal["auto"]:
        if value != "auto" and not (least <= value and (most is None or value <= most)):
            wanted = f"at least {least}" if most is None else f"{least} to {most}"
            raise ValueError(f"expected {wanted}, or auto")
        return value

    return AfterValidator(check)


def each(accepts: Callable[[str], object], wrong: str) -> AfterValidator:
    """Return the check that ``accepts`` holds for every item of a list. ``wrong`` follows an item in the error."""

    def check(items: tuple[str, ...]) -> tuple[str, ...]:
        for item in items:
            if not accepts(item):
                raise ValueError(f"{item!r} {wrong}")
        return items

    return AfterValidator(check)


def distinct(fix: str) -> AfterValidator:
    """Return the check that no item of a list is given twice. ``fix`` says what to do."""

    def check(items: tuple[str, ...]) -> tuple[str, ...]:
        for item in items:
            if items.count(item) > 1:
                raise ValueError(f"{item} is named twice; {fix}")
        return items

    return AfterValidator(check)


def as_text(value: object) -> str:
    """Return ``value`` as it is written on a command line; an empty string for None."""
    match value:
        case None:
            return ""
        case bool():
            return "T" if value else "F"
        case tuple() | list():
            return ",".join(map(str, value))
        case _:
            return str(value)


def types_of(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value may have. Yields nothing for the items of a list."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from types_of(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from types_of(each)
    else:
        yield annotation
