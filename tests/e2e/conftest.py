import pytest

from bench.server import Server, serve
from tests.gateway.deployment import Deployment
from tests.gateway.parrot import QWEN, start_parrot


@pytest.fixture(scope="package")
def builtin_server() -> Server:
    """The three real services with the built-in model, shared by the tests that leave it running."""
    with serve(device="cpu", dtype="float32") as server:
        yield server


@pytest.fixture(scope="package")
def parrot(tmp_path_factory) -> Deployment:
    """A deployment whose answer is the last user message. It calls tools and follows schemas as Qwen does."""
    running = start_parrot(tmp_path_factory.mktemp("parrot"), QWEN)
    yield running
    running.stop()
