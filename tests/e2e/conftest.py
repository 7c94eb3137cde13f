import pytest

from bench.server import Server, serve


@pytest.fixture(scope="package")
def builtin_server() -> Server:
    """The three real services with the built-in model, shared by the tests that leave it running."""
    with serve(device="cpu", dtype="float32") as server:
        yield server
