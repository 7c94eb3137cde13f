"""Where Triton kernels are tested: on the CUDA device if there is one, else in Triton's interpreter on the CPU.

``tests/conftest.py`` imports this before anything can import triton, which reads the variable when it is imported. A
module that tests kernels has ``pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]``, puts its
tensors on ``DEVICE``, and imports the kernels within its tests, so that it can be collected without triton.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"

_reason = None
if importlib.util.find_spec("triton") is None:
    _reason = "triton is not installed"
elif INTERPRETED and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        _reason = "triton was imported before its interpreter could be chosen: set TRITON_INTERPRET=1"
    else:
        os.environ["TRITON_INTERPRET"] = "1"

needs_triton = pytest.mark.skipif(_reason is not None, reason=_reason or "")


@pytest.fixture
def triton_ready(monkeypatch):
    """The interpreter as kernels need it; nothing where they are compiled."""
    with interpreter_ready(monkeypatch):
        yield


@contextlib.contextmanager
def interpreter_ready(monkeypatch):
    """``triton_ready``, in any process."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        # Scalars are arrays of one element there, which numpy 2.4 no longer takes for the bounds of a range.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
    quicken(monkeypatch, interpreter)
    # numpy warns of what is no accident in a kernel: infinities, numbers that are none, integers that wrap.
    with patched_once(monkeypatch, interpreter), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def quicken(monkeypatch, interpreter) -> None:
    """Leave out what the interpreter does in every operation for nothing: it computes whether an integer overflows, of
    which it tells nobody (``debug`` is off), and works out again what follows from a type or a shape."""
    core, options = interpreter.tl.core, interpreter.interpreter_builder.options
    assert not options.debug
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
    np_type = functools.cache(interpreter._get_np_dtype)
    make_block, make_tensor, blocks, shapes = core.block_type.__init__, core.tensor.__init__, {}, {}

    def np_type_of(dtype):
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else np_type(dtype.scalar)

    def block_type(self, element_ty, shape):
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor(self, handle, type):
        key = type.shape if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    monkeypatch.setattr(interpreter, "_get_np_dtype", np_type_of)
    monkeypatch.setattr(core.block_type, "__init__", block_type)
    monkeypatch.setattr(core.tensor, "__init__", tensor)


@contextlib.contextmanager
def patched_once(monkeypatch, interpreter):
    """Replace the functions of ``triton.language`` once for a test: the interpreter does so in each call of each
    function, which takes longer than what the function does."""
    patch, scopes = interpreter._patch_lang, {}

    def patch_lang(fn):
        languages = interpreter.tl, interpreter.tl.core
        seen = tuple(any(value is language for value in fn.__globals__.values()) for language in languages)
        if seen not in scopes:
            scopes[seen] = patch(fn)
        return SimpleNamespace(restore=lambda: None)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)
    yield
    for scope in reversed(scopes.values()):
        scope.restore()
