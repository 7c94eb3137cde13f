"""Delivers events of the step loop to streams."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TypeVar

import structlog

from services.common.boundaries import errors_to
from services.common.errors import Internal, Overloaded, TokaError
from services.common.process.tracing import Tracing
from services.scheduler.api.mailbox import Mailbox
from services.scheduler.api.unchecked_requests import UncheckedRequests
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.events import Events, PlanEvent
from services.scheduler.engine.loop import EngineLoop
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import observe_pb2

log = structlog.get_logger(__name__)

T = TypeVar("T")

_MOST_WATCHERS = 64
_WATCHED_PLANS = 256  # queued for a watcher; a slower watcher misses plans


class Hub:
    """Registry of sinks, which are numbered mailboxes of streams. Used on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._mailboxes: dict[int, Mailbox] = {}
        self._sessions: set[int] = set()
        self.unchecked = UncheckedRequests()
        self._watchers: set[asyncio.Queue[PlanEvent]] = set()
        self.engine: EngineLoop  # set by the server
        self.weights: Callable[[], weights_pb2.Weights]  # of the workers, set by the server
        self.tracing: Tracing | None = None  # set by the server

    def with_weights(self, load: observe_pb2.Load) -> observe_pb2.Load:
        """Add the weights of the workers to ``load``, if there are workers, and return it."""
        if load.total_pages:
            load.weights.CopyFrom(self.weights())
        return load

    def deliver(self, events: Events) -> None:
        """Deliver ``events`` on the event loop. Called by the step loop's thread once for each iteration."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def open(self, *, session: bool) -> tuple[int, Mailbox]:
        """Open a sink for a stream. The core receives it before any later call."""
        sink = next(self._numbers)
        # If the client does not read, its samples are cancelled now, and its stream ends after its last write.
        mailbox = Mailbox(lambda: self.engine.ask(lambda core: core.close_sink(sink)))
        self._mailboxes[sink] = mailbox
        if session:
            self._sessions.add(sink)
        self.engine.ask(lambda core: core.open_sink(sink))
        return sink, mailbox

    def close(self, sink: int) -> None:
        """Close the sink of a stream that ended. Its samples are cancelled."""
        self._mailboxes.pop(sink, None)
        self._sessions.discard(sink)
        self.engine.ask(lambda core: core.close_sink(sink))

    def end(self, error: TokaError) -> None:
        """End every stream with ``error`` after its queued events."""
        for mailbox in self._mailboxes.values():
            mailbox.close(error)

    @contextmanager
    def watching(self) -> "Iterator[asyncio.Queue[PlanEvent]]":
        """Yield a queue that gets each plan while the block runs.

        The number of watchers is limited, because each takes time of the event loop in every step. Raises
        ``Overloaded``.
        """
        if len(self._watchers) >= _MOST_WATCHERS:
            raise Overloaded(
                f"{_MOST_WATCHERS} streams watch the plans of this scheduler, which is its limit: watch later",
                retry_after_s=1.0,
                reason="TOO_MANY_WATCHERS",
            )
        queue: asyncio.Queue[PlanEvent] = asyncio.Queue(_WATCHED_PLANS)
        self._watchers.add(queue)
        self.engine.watchers = len(self._watchers)
        try:
            yield queue
        finally:
            self._watchers.discard(queue)
            self.engine.watchers = len(self._watchers)

    async def ask(self, call: Callable[[Scheduler], T], *, after_requests: bool = False) -> T:
        """Return the result of ``call(core)``, which runs on the step loop as ``EngineLoop.ask`` describes."""
        return await asyncio.wrap_future(self.engine.ask(call, after_requests=after_requests))

    async def abort(self, request_ids: Collection[str] | None) -> int:
        """End requests with the tokens that they have. Return the number of their samples.

        Requests whose grammars are being checked end afterwards. ``request_ids`` is as for ``is_chosen``.
        """
        unchecked = self.unchecked.abort(request_ids)
        return unchecked + await self.ask(lambda core: core.abort(request_ids), after_requests=True)

    async def cancel(self, request_id: str) -> int:
        """Cancel a request for an operator. Return the number of its samples.

        A request whose grammar is being checked fails afterwards.
        """
        unchecked = self.unchecked.cancel(request_id)
        return unchecked + await self.ask(lambda core: core.cancel_request(request_id), after_requests=True)

    def _dispatch(self, events: Events) -> None:
        for sink, item in events:
            if sink is not None:
                with errors_to(partial(self._end_stream, sink)):
                    if (mailbox := self._mailboxes.get(sink)) is not None:
                        mailbox.put(item)
            elif isinstance(item, observe_pb2.Load):
                self.with_weights(item)
                for session in self._sessions:
                    self._mailboxes[session].put_load(item)
            else:
                for queue in self._watchers:
                    if not queue.full():
                        queue.put_nowait(item)

    def _end_stream(self, sink: int, error: Exception) -> None:
        """End a stream that misses an event. The others continue."""
        log.error("an event could not be delivered", sink=sink, exc_info=error)
        self._mailboxes[sink].close(Internal.logged())
