"""Compilation of functions for CPUs with numba."""

import hashlib
import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.registry import cpu_target
from numba.core.typing.templates import Signature

from services.common.boundaries import errors_to

# Without "nnan" and "ninf", because NaNs must propagate from inputs to outputs.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}
# Numba notices only changes of the file that has the function.
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
).hexdigest()

# Numba numbers the functions of each process from 1. A stored object has the functions that it calls under their names
# and numbers, and the linker would take a function of another process for one of the same name and number.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))  # noqa: SLF001


def compile_function(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Compile ``function`` now, for ``signature`` only, and return it.

    The result runs in the calling thread without the interpreter lock. It is kept on disk, together with the functions
    that it calls, if there is a writable cache directory. Captured variables must be None, numbers, strings, functions
    of the worker, or tuples of these. Raises ``TypeError`` otherwise.
    """
    # Everything that decides the code is part of the name of its files, because processes that write to the same index
    # at the same time can store code under a wrong key.
    processor = cpu_target.target_context.codegen().magic_tuple()
    described = (_SOURCES, numba.__version__, llvmlite.__version__, processor, signature, _description(function))
    function.__qualname__ += "_" + hashlib.sha256(str(described).encode()).hexdigest()[:16]
    compiled: Any = numba.njit(nogil=True, fastmath=_FAST, error_model="numpy")(function)
    with suppress(RuntimeError, OSError):  # no writable cache directory
        compiled._cache = _Files(function)  # noqa: SLF001  # numba has no other way to choose the files
    compiled.compile(signature)
    compiled.disable_compile()
    called: Callable[..., Any] = compiled
    return called


class _Files(FunctionCache):
    """Files of a compiled function.

    Numba's class also compares captured variables. It would not find a function that captures another function, because
    their comparison fails in each new process.
    """

    def _index_key(self, sig, codegen):
        return sig

    def load_overload(self, sig, target_context):
        """Return the stored function, or None if there is none that can be read."""
        errors = []
        with errors_to(errors.append):
            return super().load_overload(sig, target_context)
        with suppress(OSError):
            self.flush()  # the next one can be stored
        return None

    def save_overload(self, sig, data):
        """Store the function if the disk has room for it."""
        with suppress(OSError):
            super().save_overload(sig, data)


def _description(value: object) -> object:
    """Return a description of ``value`` whose printed form is the same in each process."""
    if isinstance(value, Dispatcher):
        return _description(value.py_func)
    if isinstance(value, _Intrinsic):
        return _description(vars(value)["__wrapped__"])
    if isinstance(value, FunctionType):
        captured = [_description(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__module__, value.__qualname__, value.__code__.co_firstlineno, captured
    if isinstance(value, tuple):
        return tuple(map(_description, value))
    if isinstance(value, (bool, int, float, str, np.generic)) or value is None:
        return repr(value)
    raise TypeError(f"a compiled function captures {value!r}; capture numbers, strings, functions or tuples")
