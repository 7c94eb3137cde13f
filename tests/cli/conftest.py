"""One deployment for the tests of all commands, which do not break it."""

import pytest

from tests.gateway.deployment import Deployment


@pytest.fixture(scope="package")
def deployment(tmp_path_factory):
    running = Deployment(tmp_path_factory.mktemp("deployment"), worker={"step_ms": 2}).wait_ready()
    yield running
    running.stop()
