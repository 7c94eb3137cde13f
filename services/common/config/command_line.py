"""A program's config from how it was called."""

import os
import sys
from typing import TypeVar

from services.common.config.deployment import DeploymentConfig
from services.common.flags import Config, FlagError, load, misspelt

K = TypeVar("K", bound=Config)


def from_command_line(kind: type[K]) -> K:
    """The config of this process from its command line and environment; exits with status 2 and the reason if wrong."""
    if any(argument in ("help", "-h", "--help") for argument in sys.argv[1:]):
        print(usage(kind))
        raise SystemExit(0)
    for sentence in misspelt(os.environ, {**DeploymentConfig.model_fields, **kind.model_fields}):
        print(f"{os.path.basename(sys.argv[0])}: warning: {sentence}", file=sys.stderr)
    try:
        return load(kind, sys.argv[1:], os.environ)
    except FlagError as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def usage(kind: type[Config]) -> str:
    """One line for each flag: name, default, meaning."""
    program = os.path.basename(sys.argv[0])
    lines = [f"usage: {program} [flag=value ...]      (or TOKA_<FLAG>=value in the environment)", ""]
    for name, field in kind.model_fields.items():
        default = "" if field.is_required() else field.get_default()
        default = ",".join(default) if isinstance(default, tuple) else default
        lines.append(f"  {f'{name}={default}':<44} {field.description or ''}".rstrip())
    return "\n".join(lines)
