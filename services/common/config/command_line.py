"""Reads the config of a program from its command line and environment."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

from services.common.config.completion import OPTION, completion
from services.common.config.deployment import DeploymentConfig
from services.common.config.usage import usage, usage_of_commands
from services.common.flags import Config, FlagError, asks_for_help, load, misspelt, notes

K = TypeVar("K", bound=Config)


def from_command_line(kind: type[K]) -> K:
    """Return the config of this process from its command line and environment.

    Prints a line to stderr for each flag of another program that has no effect here. Exits with status 2 and the reason
    if a flag is wrong.
    """
    return command_from_command_line({"": kind}, "")[1]


def command_from_command_line(commands: Mapping[str, type[K]], purpose: str) -> tuple[str, K]:
    """Return the command that the first argument names, and its config from the other arguments.

    Works as ``from_command_line`` does. Prints the usage of all commands if there is no argument. A program without
    commands has one with an empty name.
    """
    arguments, program = sys.argv[1:], os.path.basename(sys.argv[0])
    try:
        if (shell := _shell(arguments)) is not None:
            print(completion(program, shell, commands), end="")
            raise SystemExit(0)
        if "" in commands:
            return "", _read(commands[""], program, arguments)
        if not arguments or (arguments[0] not in commands and asks_for_help(arguments)):
            print(usage_of_commands(commands, program, purpose))
            raise SystemExit(0 if arguments else 2)
        name = arguments[0]
        if name not in commands:
            raise FlagError(f"unknown command {name!r}: the commands are {', '.join(commands)}")
        return name, _read(commands[name], f"{program} {name}", arguments[1:])
    except FlagError as error:
        fail(str(error), status=2)


def fail(reason: str, *, status: int = 1) -> NoReturn:
    """Exit with ``status`` and with ``reason`` on stderr."""
    print(f"{os.path.basename(sys.argv[0])}: {reason}", file=sys.stderr)
    raise SystemExit(status)


def _read(kind: type[K], program: str, arguments: Sequence[str]) -> K:
    if asks_for_help(arguments):
        print(usage(kind, program))
        raise SystemExit(0)
    for sentence in misspelt(os.environ, {*DeploymentConfig.known(), *kind.known()}):
        print(f"{program}: warning: {sentence}", file=sys.stderr)
    config = load(kind, arguments, os.environ)
    for note in notes(kind, arguments, os.environ):
        print(f"{program}: {note}", file=sys.stderr)
    return config


def _shell(arguments: Sequence[str]) -> str | None:
    """Return the shell whose completion is asked for, or None."""
    if not arguments or arguments[0].partition("=")[0] != OPTION:
        return None
    return " ".join(arguments).removeprefix(OPTION).lstrip(" =")
