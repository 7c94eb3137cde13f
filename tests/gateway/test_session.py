"""One session to a scheduler, seen from its requests."""

import numpy as np
import pytest

from services.common.errors import PayloadTooLarge
from services.common.rpc.channel import MAX_PUBLIC_MESSAGE_BYTES
from services.gateway.generation import Generation
from services.gateway.job import Job, Settings
from services.gateway.metrics import RequestMetrics
from services.gateway.session.client import Session, Timings


def test_a_request_that_the_scheduler_would_not_read_is_refused_here():
    """The scheduler would end the whole session over it."""
    session = Session(None, RequestMetrics(), lambda load: None, Timings())
    prompt = np.zeros(MAX_PUBLIC_MESSAGE_BYTES // 4, dtype=np.uint32)
    [call] = Generation([Job("r", "m", prompt, 5, None, Settings())], streaming=False).calls
    with pytest.raises(PayloadTooLarge):
        session.submit(call)
    assert not session._outbox
    assert not session._samples
