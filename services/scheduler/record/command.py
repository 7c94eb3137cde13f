"""How the commands of this package read their command line."""

import os
import sys
from typing import NoReturn, TypeVar

from services.common.flags import Config, FlagError, load

K = TypeVar("K", bound=Config)


def read_flags(kind: type[K], meaning: str) -> K:
    """The config from the command line alone: the environment is that of the services, and a replay must not take over
    the worker that serves by accident. Ends the process with status 2 and the reason when it is wrong.
    """
    program, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
    if not arguments or any(argument in ("help", "-h", "--help") for argument in arguments):
        lines = [f"usage: {program} flag=value ...", meaning.strip().replace("``", ""), ""]
        lines += [f"  {name + '=':<20} {field.description}" for name, field in kind.model_fields.items()]
        print("\n".join(lines))
        raise SystemExit(0 if arguments else 2)
    try:
        return load(kind, arguments, {})
    except FlagError as error:
        fail(str(error), status=2)


def fail(reason: str, *, status: int = 1) -> NoReturn:
    """End the process with ``reason`` on stderr."""
    print(f"{os.path.basename(sys.argv[0])}: {reason}", file=sys.stderr)
    raise SystemExit(status)
