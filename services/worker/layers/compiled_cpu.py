"""Compilation of functions for CPUs with numba."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.typing.templates import Signature

_WORKER = Path(__file__).parents[1]
# Without "nnan" and "ninf", because NaNs must propagate from inputs to outputs.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}


def compile_function(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Compile ``function`` now, for ``signature`` only, and return it.

    The result runs in the calling thread without the interpreter lock. It is kept on disk, together with the functions
    that it calls, if there is a writable cache directory. If these capture variables, they must be numbers, strings,
    functions of the worker, or tuples of them, or ``TypeError`` is raised.
    """
    # The name of the files. Each version of the code and the variables has its own, because processes that write to the
    # same index at the same time can store code under a wrong key.
    description = f"{source_version()} {_description(function)}"
    function.__qualname__ += "_" + hashlib.sha256(description.encode()).hexdigest()[:16]
    compiled: Any = numba.njit(nogil=True, fastmath=_FAST, error_model="numpy")(function)
    with suppress(RuntimeError):  # no writable cache directory
        compiled._cache = _Files(function)  # noqa: SLF001  # numba has no other way to choose the files
    compiled.compile(signature)
    compiled.disable_compile()
    called: Callable[..., Any] = compiled
    return called


class _Files(FunctionCache):
    """Files of a compiled function, for each signature and processor.

    Numba's own class also compares captured variables, and takes a function among them for another one in each process.
    """

    def _index_key(self, sig, codegen):
        return sig, codegen.magic_tuple()

    def save_overload(self, sig, data):
        with suppress(OSError):  # the disk is full
            super().save_overload(sig, data)


@cache
def source_version() -> str:
    """Return a hash of the worker's modules. Numba notices only changes of the file that has the function."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_WORKER.rglob("*.py")))).hexdigest()


def _description(value: object) -> object:
    """Return what is equal in each process if the value is, in a form that is printed in the same way, too."""
    if isinstance(value, Dispatcher):
        return _description(value.py_func)
    if isinstance(value, _Intrinsic):
        return _description(vars(value)["__wrapped__"])
    if isinstance(value, FunctionType):
        captured = [_description(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__module__, value.__qualname__, captured
    if isinstance(value, tuple):
        return tuple(map(_description, value))
    if isinstance(value, (bool, int, float, str, np.generic)) or value is None:
        return repr(value)
    raise TypeError(f"a compiled function captures {value!r}; capture numbers, strings or functions")
