"""Reads command lines and environment variables into configs. All programs of the project use this parser.

``name=value``, ``--name=value`` and ``--name value`` mean the same. Dashes within a name count as underscores. A
boolean flag may be given without a value: ``--name`` is T, ``--no-name`` is F.
"""

import difflib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.common.flags.config import C, Config, build
from services.common.flags.errors import FlagError
from services.common.flags.values import BOOLEAN_WORDS, types_of

ENV_PREFIX = "TOKA_"
HELP = ("help", "-h", "--help")


def split_arguments(kind: type[Config], arguments: Sequence[str]) -> dict[str, str]:
    """Return the value of each flag in ``arguments``.

    Raises ``FlagError`` for an argument that is no flag of ``kind``, or is given twice.
    """
    values: dict[str, str] = {}
    for name, value in _parse(kind, arguments):
        if name in values:
            raise FlagError(f"flag {name!r} is given twice: {values[name]!r} and {value!r}")
        values[name] = value
    return values


def without_flags(kind: type[Config], arguments: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return ``arguments`` as ``name=value``, without the flags in ``names``. Raises ``FlagError``."""
    removed = set(names)
    return [f"{name}={value}" for name, value in split_arguments(kind, arguments).items() if name not in removed]


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether one of ``arguments`` asks for the usage. The value in ``--name help`` does not."""
    return any(
        each in HELP[1:] or (each == HELP[0] and not before.startswith("--"))
        for before, each in zip(["", *arguments], arguments, strict=False)
    )


def read_environment(environment: Mapping[str, str], kind: type[Config]) -> dict[str, str]:
    """Return the flags that environment variables set. An empty variable counts as unset."""
    variables = kind.variables
    if variables is None:
        variables = {name: (ENV_PREFIX + name.upper(),) for name in kind.known()}
    found = {name: [environment[each] for each in names if environment.get(each)] for name, names in variables.items()}
    return {name: values[0] for name, values in found.items() if values}


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a sentence for each variable that looks like a misspelt ``TOKA_<FLAG>`` and has no effect."""
    names = [ENV_PREFIX + name.upper() for name in known]
    strangers = sorted(name for name in environment.keys() - set(names) if name.startswith(ENV_PREFIX))
    meant = {name: difflib.get_close_matches(name, names, n=1, cutoff=0.85) for name in strangers}
    return [f"{name} in the environment is no flag: did you mean {near[0]}=?" for name, near in meant.items() if near]


def load(kind: type[C], arguments: Sequence[str], environment: Mapping[str, str]) -> C:
    """Return the config of one program: defaults, then the environment, then the command line. Raises ``FlagError``."""
    from_environment, from_arguments = _given(kind, arguments, environment)
    return build(kind, _translate(kind, from_environment) | _translate(kind, from_arguments))


def notes(kind: type[Config], arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a line for each given flag of another program that has no effect here."""
    from_environment, from_arguments = _given(kind, arguments, environment)
    given = from_environment | from_arguments
    found = (kind.translations[name].note(name, value) for name, value in given.items() if name in kind.translations)
    return [note for note in found if note is not None]


def _parse(kind: type[Config], arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each flag."""
    names, unnamed, left = kind.known(), deque(kind.positional), deque(arguments)
    while left:
        given = left.popleft()
        argument = kind.shorthands.get(given, given)
        spelling, equals, value = argument.partition("=")
        dashed = spelling.startswith("-")
        name = spelling.lstrip("-").replace("-", "_")
        if equals and name in names:
            yield name, value
        elif not dashed and not equals and unnamed:
            yield unnamed.popleft(), argument
        elif dashed and not equals and (name in names or name.removeprefix("no_") in names):
            yield _value_behind(kind, given, name, left)
        else:
            raise _unknown(kind, argument, name, has_value=bool(equals))


def _value_behind(kind: type[Config], argument: str, name: str, left: deque[str]) -> tuple[str, str]:
    """Return the flag and the value of ``--name``, which is taken from ``left`` unless a boolean has none."""
    if name not in kind.known():
        positive = name.removeprefix("no_")
        if not _is_boolean(kind, positive):
            raise FlagError(f"{argument}: flag {positive} is no boolean; write --{positive} VALUE")
        return positive, "F"
    if _is_boolean(kind, name):
        words = {*BOOLEAN_WORDS, "auto"}
        return name, left.popleft() if left and left[0].lower() in words else "T"
    if not left or left[0].startswith("--"):
        raise FlagError(f"flag {argument!r} has no value: write --{name} VALUE or {name}=VALUE")
    return name, left.popleft()


def _is_boolean(kind: type[Config], name: str) -> bool:
    field = kind.fields_by_flag().get(name)
    return field is not None and bool in types_of(field.annotation)


def _unknown(kind: type[Config], argument: str, name: str, *, has_value: bool) -> FlagError:
    names = kind.known()
    if name in names:
        return FlagError(f"flag {argument!r} has no value: write {name}=VALUE")
    suggested = kind.suggestions.get(name)
    close = [suggested] if suggested in names else difflib.get_close_matches(name, names, n=1)
    if not has_value and not close:
        return FlagError(f"{argument!r} is not a flag: write flag=value; the argument help lists the flags")
    known = f"did you mean {close[0]}=?" if close else f"the flags are {', '.join(sorted(names))}"
    return FlagError(f"unknown flag {name!r} in {argument!r}: {known}")


def _given(
    kind: type[Config], arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the flags of the environment and of the command line.

    "None" is a flag without a value, as in the original Tokasaurus.
    """
    given = read_environment(environment, kind), split_arguments(kind, arguments)
    for values in given:
        for name in [name for name in values if name in kind.refused]:
            raise FlagError(f"flag {name}: {kind.refused[name]}")
        for name in [name for name, value in values.items() if value == "None" and _may_be_none(kind, name)]:
            del values[name]
    return given


def _may_be_none(kind: type[Config], name: str) -> bool:
    field = kind.fields_by_flag().get(name)
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
