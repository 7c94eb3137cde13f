"""How functions are compiled for CPUs."""

from collections.abc import Callable

import numba

# Without the assumption that there are no NaNs: they must come out where they went in.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}


def compile_function(
    function: Callable, signature: numba.core.typing.Signature, *, constants: tuple[int, ...] = (), keep: bool = True
) -> Callable:
    """``function`` compiled now for ``signature`` and no other, kept on disk where there is a place for it.

    It runs in the calling thread and holds no lock of Python. ``constants``: what a closure was made with; each set has
    files of its own, since two processes that write one index at once can leave the other's code under their own key.
    ``keep=False`` for a function that calls compiled ones: numba would not find it again, and store it at every start.
    """
    options = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    if not keep:
        return numba.njit(signature, **options)(function)
    function.__qualname__ = "_".join((function.__qualname__, *map(str, constants)))
    try:
        return numba.njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # no cache directory, or one that cannot be written: compile at every start
        return numba.njit(signature, **options)(function)
