"""One deployment for all tests that do not break it."""

import pytest

from services.common.text.tokenizer import Tokenizer
from tests.gateway.deployment import Deployment


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.load("builtin")


@pytest.fixture(scope="session")
def deployment(tmp_path_factory):
    """Random tokens, never an end of sequence by itself."""
    running = Deployment(tmp_path_factory.mktemp("deployment")).wait_ready()
    yield running
    running.stop()


@pytest.fixture
def sdk(deployment):
    with deployment.sdk() as client:
        yield client


@pytest.fixture(scope="session")
def model(deployment):
    with deployment.sdk() as client:
        return client.models.list().data[0].id
