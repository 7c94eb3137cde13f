"""``key=value`` command lines and ``TOKA_<FLAG>`` environment variables, read into one frozen config.

Values as in the original Tokasaurus: ``T`` and ``F`` for booleans, and arithmetic in parentheses for whole numbers
(``kv_cache_num_tokens='(512 * 1024)'``), evaluated over an AST of numbers and operators only.
"""

import ast
import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

ENV_PREFIX = "TOKA_"
Examples = tuple[tuple[str, str], ...]  # arguments, and what they do


class FlagError(Exception):
    """A flag is wrong. The message names it, what was expected, and the nearest right one."""


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
    """Base of every config: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    examples: ClassVar[Examples] = ()  # of its usage
    never_given: ClassVar[frozenset[str]] = frozenset()  # flags that it has, and refuses
    translations: ClassVar[Mapping[str, Translation]] = {}  # flags of another program that it accepts
    shorthands: ClassVar[Mapping[str, str]] = {}  # arguments that stand for another one

    @classmethod
    def known(cls) -> list[str]:
        """Return the names of all flags: its own, then those it accepts from another program."""
        fields = cls.model_fields
        accepted = cls.translations.items()
        return [*fields, *(name for name, each in accepted if each.counterpart is None or each.counterpart in fields)]


C = TypeVar("C", bound=Config)

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
    """``'(512 * 1024)'`` -> 524288; anything that is not text in parentheses passes through."""
    if not (isinstance(value, str) and value.strip().startswith("(")):
        return value
    try:
        result = _evaluate(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot be evaluated: {error}") from error
    return int(result) if isinstance(result, float) and result.is_integer() else result


def true_false(value: Any) -> Any:
    """``T``/``F`` (and ``true``/``false``, ``1``/``0``) -> bool."""
    if isinstance(value, bool):
        return value
    known = {"t": True, "true": True, "1": True, "f": False, "false": False, "0": False}
    if str(value).lower() not in known:
        raise ValueError("expected T or F")
    return known[str(value).lower()]


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


def split_arguments(arguments: Sequence[str], known: Iterable[str]) -> dict[str, str]:
    """``['a=1', 'b=2']`` -> ``{'a': '1', 'b': '2'}``; raises ``FlagError`` for anything that is not a known flag."""
    names = list(known)
    values: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in names:
            if not equals and not difflib.get_close_matches(name, names, n=1):
                raise FlagError(f"{argument!r} is not a flag: write flag=value; the argument help lists the flags")
            raise FlagError(f"unknown flag {name!r} in {argument!r}{_suggest(name, names)}")
        if not equals:
            raise FlagError(f"flag {argument!r} has no value: write {name}=VALUE")
        if name in values:
            raise FlagError(f"flag {name!r} is given twice: {values[name]!r} and {value!r}")
        values[name] = value
    return values


def read_environment(environment: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """The values of ``TOKA_<FLAG>`` for the known flags; an empty value counts as unset."""
    return {
        name: environment[ENV_PREFIX + name.upper()] for name in known if environment.get(ENV_PREFIX + name.upper())
    }


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """A sentence for each variable that looks like ``TOKA_<FLAG>`` misspelt: it has no effect."""
    names = [ENV_PREFIX + name.upper() for name in known]
    strangers = sorted(name for name in environment.keys() - set(names) if name.startswith(ENV_PREFIX))
    meant = {name: difflib.get_close_matches(name, names, n=1, cutoff=0.85) for name in strangers}
    return [f"{name} in the environment is no flag: did you mean {near[0]}=?" for name, near in meant.items() if near]


def build(kind: type[C], values: Mapping[str, Any]) -> C:
    """Validate ``values`` into a config; ``FlagError`` names the flag, its value and what was expected."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise FlagError("; ".join(_describe(problem) for problem in error.errors())) from error


def load(kind: type[C], arguments: Sequence[str], environment: Mapping[str, str]) -> C:
    """Return the config of one program: defaults, then the environment, then the command line."""
    from_environment, from_arguments = _given(kind, arguments, environment)
    return build(kind, _translate(kind, from_environment) | _translate(kind, from_arguments))


def notes(kind: type[Config], arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a line for each given flag of another program that has no effect here."""
    from_environment, from_arguments = _given(kind, arguments, environment)
    given = from_environment | from_arguments
    found = (kind.translations[name].note(name, value) for name, value in given.items() if name in kind.translations)
    return [note for note in found if note is not None]


def _given(
    kind: type[Config], arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the flags of the environment and of the command line. "None" is a flag without a value, as in the
    original Tokasaurus."""
    names = kind.known()
    spelt_out = [kind.shorthands.get(argument, argument) for argument in arguments]
    given = read_environment(environment, names), split_arguments(spelt_out, names)
    for values in given:
        for name in [name for name, value in values.items() if value == "None" and _may_be_none(kind, name)]:
            del values[name]
    return given


def _may_be_none(kind: type[Config], name: str) -> bool:
    field = kind.model_fields.get(name)
    return field is None or (not field.is_required() and field.default is None)


def _translate(kind: type[Config], given: Mapping[str, str]) -> dict[str, str]:
    """Return ``given`` with flags of another program replaced by the flags they stand for."""
    values = {name: value for name, value in given.items() if name not in kind.translations}
    for name in [name for name in given if name in kind.translations]:
        try:
            meant = kind.translations[name].to(given[name])
        except ValueError as error:
            raise FlagError(f"flag {name}={given[name]}: {error}") from error
        for counterpart, value in meant.items():
            if values.setdefault(counterpart, value) != value:
                raise FlagError(
                    f"flag {name}={given[name]} means {counterpart}={value}, and"
                    f" {counterpart}={values[counterpart]} is given, too: leave one of them out"
                )
    return values


def _describe(problem: Any) -> str:
    message: str = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = problem["loc"][0]
    given = repr(problem["input"])
    given = given if len(given) <= 100 else f"{given[:97]}..."
    return f"flag {name}={given}: {message[0].lower()}{message[1:]}"


def _suggest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]}=?" if close else f": the flags are {', '.join(sorted(names))}"
