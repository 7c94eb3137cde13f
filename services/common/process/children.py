"""Builds commands that start a Python program of ours in a child process.

``python -m`` and ``python -c`` put the current directory in front of ``sys.path``. The current directory may be a
model's directory, whose files are data: an ``orjson.py`` there must not become the module ``orjson``.
"""

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[3]  # the directory that holds the package ``services``
_SAFE_PATH = "PYTHONSAFEPATH"  # has the effect of ``-P`` for all Python programs that inherit it


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``module``. Start it with ``module_environment``."""
    return [sys.executable, "-P", "-m", module, *arguments]


def script_command(path: str, *arguments: str) -> list[str]:
    """Return the command that runs the file ``path``, which imports the standard library only."""
    return [sys.executable, "-I", "-S", path, *arguments]


def module_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environment`` with which a child imports the same ``services`` package as this process.

    In a checkout the package may be importable through the current directory only, which the child does not search.
    Empty entries of ``PYTHONPATH``, which mean the current directory, are removed.
    """
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if not _is_site_directory(_ROOT):
        entries = [str(_ROOT), *(entry for entry in entries if entry != str(_ROOT))]
    others = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    return others | {_SAFE_PATH: "1"} | ({"PYTHONPATH": os.pathsep.join(entries)} if entries else {})


def use_safe_paths() -> None:
    """Make every Python child of this process ignore the current directory.

    This includes children that libraries start: ``multiprocessing`` and the compilers of torch and Triton.
    """
    os.environ[_SAFE_PATH] = "1"


def _is_site_directory(directory: Path) -> bool:
    """Return whether Python searches ``directory`` by default.

    A directory on ``PYTHONPATH`` would precede the standard library.
    """
    return any(directory == Path(each) for each in (*site.getsitepackages(), site.getusersitepackages()))
