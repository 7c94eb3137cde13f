"""A program's config from how it was called."""

import os
import sys
from typing import TypeVar

from services.common.config.completion import OPTION, completion
from services.common.config.deployment import DeploymentConfig
from services.common.config.usage import usage
from services.common.flags import Config, FlagError, load, misspelt, notes

K = TypeVar("K", bound=Config)


def from_command_line(kind: type[K]) -> K:
    """Return the config of this process from its command line and environment.

    Prints a line to stderr for each flag of another program that has no effect here. Exits with status 2 and the reason
    if a flag is wrong.
    """
    arguments, program = sys.argv[1:], os.path.basename(sys.argv[0])
    if any(argument in ("help", "-h", "--help") for argument in arguments):
        print(usage(kind))
        raise SystemExit(0)
    for sentence in misspelt(os.environ, {*DeploymentConfig.known(), *kind.known()}):
        print(f"{program}: warning: {sentence}", file=sys.stderr)
    try:
        if arguments and arguments[0].partition("=")[0] == OPTION:
            shell = " ".join(arguments).removeprefix(OPTION).lstrip(" =")
            print(completion(program, shell, kind), end="")
            raise SystemExit(0)
        config = load(kind, arguments, os.environ)
        for note in notes(kind, arguments, os.environ):
            print(f"{program}: {note}", file=sys.stderr)
        return config
    except FlagError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
