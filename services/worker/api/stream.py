"""One RunSteps stream between the asyncio thread, which owns it, and the compute thread, which answers into it."""

import asyncio

from services.common.errors import TokaError
from tokasaurus.worker.v1 import plan_pb2

END = object()


class Superseded(Exception):
    """A new hello has taken the worker over; this stream ends with ABORTED."""


class Stream:
    """Answers wait in a queue that ``plans_in_flight`` bounds: the client may not have more plans unanswered."""

    def __init__(self, plans_in_flight: int, scheduler_id: str) -> None:
        self.plans_in_flight, self.scheduler_id = plans_in_flight, scheduler_id
        self.closed = False  # set in the asyncio thread, read in both
        self.unanswered = 0  # asyncio thread only
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[plan_pb2.StepResult | Exception | object] = asyncio.Queue()

    def answer(self, result: plan_pb2.StepResult) -> None:
        """From the compute thread."""
        self._post(result)

    def fail(self, error: TokaError) -> None:
        """From the compute thread."""
        self._post(error)

    def finish(self) -> None:
        """From the compute thread, behind the last answer."""
        self._post(END)

    def end(self, error: Exception) -> None:
        """From the asyncio thread: end the stream with ``error``."""
        self._outbox.put_nowait(error)

    async def next_answer(self) -> plan_pb2.StepResult | None:
        """The next answer, None at the end; raises what the stream failed with."""
        item = await self._outbox.get()
        if isinstance(item, Exception):
            raise item
        if item is END:
            return None
        self.unanswered -= 1
        return item

    def _post(self, item: object) -> None:
        # After the loop is closed nobody is there to read.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, item)
