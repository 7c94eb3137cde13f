"""The text that ``help`` prints."""

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping

from services.common.config.flag import BOOLEANS, Flag, flags_of
from services.common.flags import Config, Examples

_NAMES, _NARROWEST, _WIDEST = 36, 80, 160
_SYNTAX = (
    "Write flag=value, --flag=value or --flag value, in any order. T and F are booleans; --flag is T, --no-flag is F."
    " Numbers in parentheses are evaluated: '(512 * 1024)'."
)
_VARIABLES = "Each flag is also an environment variable, TOKA_<FLAG>; the command line wins."


def usage(kind: type[Config], program: str = "") -> str:
    """Return the purpose of ``program``, examples, and a paragraph for each flag: name, default, meaning.

    ``program`` is this process by default.
    """
    program, width = program or os.path.basename(sys.argv[0]), _width()
    named = "".join(f" {name.upper()}" for name in kind.positional)
    lines = [f"usage: {program}{named} [flag=value | --flag value ...]", "", *textwrap.wrap(_text(kind), width)]
    examples: Examples = vars(kind).get("examples", ())
    lines += [""] if examples else []
    for arguments, meaning in examples:
        lines.append(f"  {program} {arguments}".rstrip())
        lines += textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    complete = f'eval "$({program.split()[0]} --completion bash)"'
    lines += [
        "",
        *textwrap.wrap(
            f"{_SYNTAX} {_environment(kind)} Shells complete flags and their values: {complete}, or zsh, or fish.",
            width,
        ),
    ]
    for group, flags in itertools.groupby(flags_of(kind), key=lambda flag: flag.group):
        lines += ["", *(textwrap.wrap(_text(group), width) if group is not kind else ())]
        for flag in flags:
            lines += _paragraph(flag, width)
    others = [name for name in kind.known() if name in kind.translations]
    if others:
        text = "Flags of the original Tokasaurus are accepted, too; docs/flags.md says what each does here: "
        lines += ["", *textwrap.wrap(f"{text}{', '.join(others)}.", width)]
    return "\n".join(lines)


def usage_of_commands(commands: Mapping[str, type[Config]], program: str, purpose: str) -> str:
    """Return the purpose of ``program`` and of each of its commands."""
    width = _width()
    lines = [f"usage: {program} COMMAND [flag=value | --flag value ...]", "", *textwrap.wrap(purpose, width), ""]
    for name, kind in commands.items():
        first = (kind.__doc__ or "").partition("\n\n")[0]
        lines += textwrap.wrap(first, width, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)
    return "\n".join([*lines, "", f"The flags of a command: {program} COMMAND --help"])


def _environment(kind: type[Config]) -> str:
    if kind.variables is None:
        return _VARIABLES
    if not kind.variables:
        return "The environment sets no flag."
    return (
        "Environment variables: "
        + "; ".join(f"{' or '.join(names)} sets {flag}" for flag, names in kind.variables.items())
        + "."
    )


def _width() -> int:
    return min(max(shutil.get_terminal_size((120, 24)).columns, _NARROWEST), _WIDEST)


def _text(kind: type[Config]) -> str:
    """Return the docstring as one paragraph."""
    return " ".join((kind.__doc__ or "").replace("``", "").split())


def _paragraph(flag: Flag, width: int) -> list[str]:
    head = f"  {flag.name}={flag.default or ''}"
    parts = ["must be given"] if flag.default is None else []
    parts += [flag.description] if flag.description else []
    if len(flag.choices) > 1 and flag.choices != BOOLEANS:
        parts.append(f"({' | '.join(flag.choices)})")
    meaning = textwrap.wrap(" ".join(parts), width - _NAMES) or [""]
    if len(head) >= _NAMES:
        return [head, *(" " * _NAMES + line for line in meaning)]
    return [f"{head:<{_NAMES}}{meaning[0]}".rstrip(), *(" " * _NAMES + line for line in meaning[1:])]
