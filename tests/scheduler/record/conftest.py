"""A recorded run for all tests of a module."""

import pytest

from services.scheduler.record.reader import RecordedStep
from tests.scheduler.record.loop import record_small_run


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[RecordedStep]:
    """Slot 0 prefills 40 tokens over three steps; slots 1 to 5 share a prompt of 15 tokens, in pages of 4, and its last
    page is copied in step 3. Step 4 has the first groups, step 12 releases all and admits another.
    """
    return list(record_small_run(tmp_path_factory.mktemp("recording")).steps())
