"""Loaded before any test module, and so before anything that imports triton."""

from tests.worker.interpreter import triton_ready

__all__ = ["triton_ready"]
