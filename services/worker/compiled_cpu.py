"""How functions are compiled for CPUs."""

from collections.abc import Callable

import numba

# Without the assumption that there are no NaNs: they must come out where they went in.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}


def compile_function(function: Callable, signature: numba.core.typing.Signature) -> Callable:
    """``function`` compiled now for ``signature`` and no other, kept on disk where there is a place for it.

    It runs in the calling thread and holds no lock of Python.
    """
    options = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    try:
        return numba.njit(signature, cache=True, **options)(function)
    except RuntimeError:  # no cache directory can be written: compile at every start
        return numba.njit(signature, **options)(function)
