"""How a command begins whose packages may be missing."""

import importlib
import sys

from services.common.process.children import use_safe_paths


def run(program: str, module: str) -> None:
    """The typer ``app`` of ``module``. What it needs is the extra ``cli``: without it, a sentence and status 2."""
    use_safe_paths()
    try:
        app = importlib.import_module(module).app
    except ModuleNotFoundError as error:
        print(f"{program}: {error.name} is not installed: pip install 'tokasaurus[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name=program)
