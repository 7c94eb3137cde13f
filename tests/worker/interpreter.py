"""Where Triton kernels are tested: on the CUDA device if there is one, else in Triton's interpreter on the CPU.

``tests/conftest.py`` imports this before anything can import triton, which reads the variable when it is imported. A
module that tests kernels has ``pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]``, puts its
tensors on ``DEVICE``, and imports the kernels within its tests, so that it can be collected without triton.
"""

import contextlib
import importlib.util
import os
import sys
import warnings
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
    # numpy warns of what is no accident in a kernel: infinities, numbers that are none, integers that wrap.
    with patched_once(monkeypatch, interpreter), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


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
