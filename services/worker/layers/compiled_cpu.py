"""Compilation of functions for CPUs with numba."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.typing.templates import Signature

# Without "nnan" and "ninf", because NaNs must propagate from inputs to outputs.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}


def compile_function(
    function: Callable[..., Any], signature: Signature, *, constants: tuple[int, ...] = (), keep: bool = True
) -> Callable[..., Any]:
    """Compile ``function`` now, for ``signature`` only, and return it.

    The result runs in the calling thread without the interpreter lock. With ``keep`` it is cached on disk if there is a
    writable cache directory. Use ``keep=False`` for a function that calls compiled functions, because numba would not
    find it again and would store another copy at each start.

    ``constants`` are the values captured by a closure. Each set of values has its own cache files, because processes
    that write to the same index at the same time can store code under a wrong key. So has each version of the worker's
    modules for CPUs, since numba notices only changes of the file that has the function.
    """
    if not keep:
        return _compile(function, signature)
    function.__qualname__ = "_".join((function.__qualname__, source_version(), *map(str, constants)))
    try:
        return _compile(function, signature, cache=True)
    except (RuntimeError, OSError):  # no writable cache directory
        return _compile(function, signature)


@cache
def source_version() -> str:
    """Return a hash of the worker's modules for CPUs, whose functions call one another."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.parent.glob("*/*_cpu.py")))
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12]


def _compile(function: Callable[..., Any], signature: Signature, *, cache: bool = False) -> Callable[..., Any]:
    compiler = numba.njit(signature, cache=cache, nogil=True, fastmath=_FAST, error_model="numpy")
    compiled: Callable[..., Any] = compiler(function)
    return compiled
