"""Starts a command whose packages may be missing."""

import importlib
import sys

from services.common.process.children import use_safe_paths


def run(program: str, module: str) -> None:
    """Call ``main`` of ``module``. Exits with status 2 and the reason if a package of the extra ``cli`` is missing."""
    use_safe_paths()
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        print(f"{program}: {error.name} is not installed: pip install 'tokasaurus[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv[0] = program  # also for python -m
    main()
