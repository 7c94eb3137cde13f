"""How functions are compiled for CPUs."""

from collections.abc import Callable
from typing import Any

import numba
from numba.core.typing.templates import Signature

# Without the assumption that there are no NaNs: they must come out where they went in.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}


def compile_function(
    function: Callable[..., Any], signature: Signature, *, constants: tuple[int, ...] = (), keep: bool = True
) -> Callable[..., Any]:
    """``function`` compiled now for ``signature`` and no other, kept on disk where there is a place for it.

    It runs in the calling thread and holds no lock of Python. ``constants``: what a closure was made with; each set has
    files of its own, since two processes that write one index at once can leave the other's code under their own key.
    ``keep=False`` for a function that calls compiled ones: numba would not find it again, and store it at every start.
    """
    if not keep:
        return _compile(function, signature)
    function.__qualname__ = "_".join((function.__qualname__, *map(str, constants)))
    try:
        return _compile(function, signature, cache=True)
    except (RuntimeError, OSError):  # no cache directory, or one that cannot be written: compile at every start
        return _compile(function, signature)


def _compile(function: Callable[..., Any], signature: Signature, *, cache: bool = False) -> Callable[..., Any]:
    compiler = numba.njit(signature, cache=cache, nogil=True, fastmath=_FAST, error_model="numpy")
    compiled: Callable[..., Any] = compiler(function)
    return compiled
