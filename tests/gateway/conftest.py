"""One deployment for all tests that do not break it, which ends with them: one at rest takes time of others, too."""

import pytest

from services.common.text.tokenizer import Tokenizer
from tests.gateway.deployment import Deployment
from tests.gateway.parrot import LLAMA, QWEN, start_parrot


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.load("builtin")


@pytest.fixture(scope="package")
def deployment(tmp_path_factory):
    """Random tokens, never an end of sequence by itself."""
    running = Deployment(tmp_path_factory.mktemp("deployment")).wait_ready()
    yield running
    running.stop()


@pytest.fixture
def sdk(deployment):
    with deployment.sdk() as client:
        yield client


@pytest.fixture(scope="package")
def model(deployment):
    with deployment.sdk() as client:
        return client.models.list().data[0].id


@pytest.fixture(scope="package")
def bare(tmp_path_factory):
    """A deployment without a store."""
    running = Deployment(tmp_path_factory.mktemp("bare"), gateway={"store_url": "none"}).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="package")
def qwen(tmp_path_factory):
    """A parrot that thinks and calls tools as Qwen3 does."""
    running = start_parrot(tmp_path_factory.mktemp("qwen"), QWEN)
    yield running
    running.stop()


@pytest.fixture(scope="package")
def llama(tmp_path_factory):
    """A parrot that calls tools as Llama 3 does."""
    running = start_parrot(tmp_path_factory.mktemp("llama"), LLAMA)
    yield running
    running.stop()
