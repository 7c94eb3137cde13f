"""The scheduler's end of a session, played by a test."""

from collections import deque
from collections.abc import Iterable

import grpc
import pytest

from services.common.errors import TokaError, Unavailable
from services.common.rpc.status import to_status
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.session import Session, Timings
from services.gateway.engine.session_owner import Owner
from tokasaurus.scheduler.v1 import generate_pb2, session_pb2


class SchedulerEnd:
    """A session, and the stream that it reads from and writes to. The stream ends after what it was told to send."""

    def __init__(self, owner: Owner | None = None, *, controls_stragglers: bool = True) -> None:
        self.metrics = RequestMetrics()
        self.session = Session(self, self.metrics, owner, Timings(), controls_stragglers=controls_stragglers)
        self.written: list[session_pb2.SessionRequest] = []
        self._sent: deque[session_pb2.SessionResponse] = deque()

    async def read(self):
        return self._sent.popleft() if self._sent else grpc.aio.EOF

    async def write(self, message: session_pb2.SessionRequest) -> None:
        self.written.append(message)

    async def send(self, *messages: session_pb2.SessionResponse) -> None:
        """Let the session read these messages."""
        self._sent.extend(messages)
        with pytest.raises(Unavailable, match="closed the session"):
            await self.session.run()

    async def outputs(self, *, finished: dict[int, generate_pb2.Finish] | None = None, **fields) -> None:
        """Send a step's tokens, with the ends of the handles ``finished``."""
        ends = [session_pb2.Finished(handle=handle, finish=finish) for handle, finish in (finished or {}).items()]
        await self.send(session_pb2.SessionResponse(outputs=session_pb2.StepOutputs(finished=ends, **fields)))

    async def accept(self, *handles: int) -> None:
        await self.send(
            *(session_pb2.SessionResponse(acceptance=session_pb2.Acceptance(handle=handle)) for handle in handles)
        )

    async def reject(self, handle: int, error: TokaError) -> None:
        rejection = session_pb2.Rejection(handle=handle, status=to_status(error))
        await self.send(session_pb2.SessionResponse(rejection=rejection))

    @property
    def cancelled(self) -> list[int]:
        """The handles whose cancels were sent."""
        return [handle for message in self.written for handle in message.cancel.handles]


def finish(completion_tokens: int = 1, prompt_tokens: int = 1, error: TokaError | None = None) -> generate_pb2.Finish:
    reason = generate_pb2.FINISH_REASON_LENGTH if error is None else generate_pb2.FINISH_REASON_ERROR
    usage = generate_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return generate_pb2.Finish(reason=reason, usage=usage, error=None if error is None else to_status(error))


def error_of(running: ActiveRequest) -> TokaError | None:
    """The error with which a request has failed."""
    try:
        running.check()
    except TokaError as error:
        return error
    return None


def failovers(metrics: RequestMetrics) -> dict[str, int]:
    """Samples that were sent again, by reason, without zeros."""
    samples: Iterable = (
        sample for family in metrics.families("m") if family.name == "toka_failovers" for sample in family.samples
    )
    return {sample.labels["reason"]: int(sample.value) for sample in samples if sample.value}
