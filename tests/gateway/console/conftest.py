"""A deployment with slow steps, so that there is something to watch, and one scheduler that never comes."""

import pytest

from bench.server import free_port
from tests.gateway.deployment import Deployment

STEP_MS = 50


@pytest.fixture(scope="session")
def nobody() -> str:
    """Where no scheduler is."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="session")
def watched(tmp_path_factory, nobody):
    directory = tmp_path_factory.mktemp("watched")
    running = Deployment(directory, worker={"step_ms": STEP_MS}, other_schedulers=(nobody,)).wait_ready()
    yield running
    running.stop()
