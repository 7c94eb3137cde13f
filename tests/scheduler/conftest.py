"""A service for tests that change nothing about it."""

import pytest

from tests.scheduler.service import start


@pytest.fixture
async def service():
    async with start() as running:
        yield running
