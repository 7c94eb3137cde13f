"""Loaded before any test module, and so before anything that imports triton."""

import os
from collections.abc import Iterator

import pytest

from tests.worker.interpreter import triton_ready

__all__ = ["triton_ready"]


@pytest.fixture(scope="session", autouse=True)
def store_of_this_session(tmp_path_factory) -> Iterator[None]:
    """Servers keep files and batches here that are not told where: not where this user's own do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(os.environ, "TOKA_STORE_DIR", str(tmp_path_factory.mktemp("store")))
        yield
