"""The interface to the owner of a session."""

from typing import Protocol

import numpy as np

from services.common.errors import TokaError
from services.gateway.engine.active_request import ActiveSample, SchedulerRequest
from tokasaurus.scheduler.v1 import observe_pb2


class Owner(Protocol):
    """The object that opened a session and receives its events."""

    def loaded(self, load: observe_pb2.Load) -> None:
        """Record the load that the scheduler reported."""

    def refused(self, request: SchedulerRequest, error: TokaError) -> None:
        """Handle ``request``, which the scheduler refused."""

    def lose(self, tokens: dict[ActiveSample, np.ndarray], error: TokaError) -> None:
        """Handle unfinished samples that the scheduler gave up, with their tokens (uint32) of this session."""
