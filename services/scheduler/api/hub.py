"""Hands what the step loop says to the streams it is for."""

import asyncio
from collections.abc import Callable
from itertools import count

import structlog

from services.common.errors import Internal, Overloaded, TokaError
from services.common.process.tracing import Tracing
from services.scheduler.api.mailbox import Mailbox
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step.load import Load
from services.scheduler.engine.loop import Asked, EngineLoop
from services.scheduler.engine.news import News, PlanNews

log = structlog.get_logger(__name__)

_MOST_WATCHERS = 64
_WATCHED_PLANS = 256  # a watcher that is further behind misses plans


class Hub:
    """Owned by the asyncio loop. A sink is a mailbox with a number."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._mailboxes: dict[int, Mailbox] = {}
        self._sessions: set[int] = set()
        self._watchers: set[asyncio.Queue[PlanNews]] = set()
        self.engine: EngineLoop  # set once, by the server
        self.tracing: Tracing | None = None  # so, too

    def deliver(self, news: News) -> None:
        """Called by the step loop, on its thread: one wake-up for each turn."""
        self._loop.call_soon_threadsafe(self._dispatch, news)

    def open(self, *, session: bool) -> tuple[int, Mailbox]:
        """A new sink for the calling stream, known to the core before anything that is posted later."""
        sink = next(self._numbers)
        # A client that does not read: its samples end now, its stream when its last write comes back.
        mailbox = Mailbox(lambda: self.engine.ask(lambda core: core.close_sink(sink)))
        self._mailboxes[sink] = mailbox
        if session:
            self._sessions.add(sink)
        self.engine.ask(lambda core: core.open_sink(sink))
        return sink, mailbox

    def close(self, sink: int) -> None:
        """The stream is gone: its samples end."""
        self._mailboxes.pop(sink, None)
        self._sessions.discard(sink)
        self.engine.ask(lambda core: core.close_sink(sink))

    def end(self, error: TokaError) -> None:
        """Every stream ends with ``error``, behind what there is for it."""
        for mailbox in self._mailboxes.values():
            mailbox.close(error)

    def watch(self) -> "asyncio.Queue[PlanNews]":
        """Return a queue that gets each plan from now on; ``unwatch`` ends that. Each watcher costs the event loop time
        in every step, so their number is bounded: raises ``Overloaded``."""
        if len(self._watchers) >= _MOST_WATCHERS:
            raise Overloaded(
                f"{_MOST_WATCHERS} streams watch the plans of this scheduler, and it takes no more: watch later",
                retry_after_s=1.0,
                reason="TOO_MANY_WATCHERS",
            )
        queue: asyncio.Queue[PlanNews] = asyncio.Queue(_WATCHED_PLANS)
        self._watchers.add(queue)
        self.engine.watchers = len(self._watchers)
        return queue

    def unwatch(self, queue: "asyncio.Queue[PlanNews]") -> None:
        self._watchers.discard(queue)
        self.engine.watchers = len(self._watchers)

    async def ask(self, question: Callable[[Scheduler], Asked]) -> Asked:
        """``question(core)`` answered by the step loop."""
        return await asyncio.wrap_future(self.engine.ask(question))

    def _dispatch(self, news: News) -> None:
        for sink, item in news:
            if sink is not None:
                try:
                    if (mailbox := self._mailboxes.get(sink)) is not None:
                        mailbox.put(item)
                except Exception as error:  # a stream that was not told everything must end; others are told theirs
                    log.error("news could not be handed on", sink=sink, exc_info=error)
                    self._mailboxes[sink].close(Internal.logged())
            elif isinstance(item, Load):
                for session in self._sessions:
                    self._mailboxes[session].put_load(item)
            else:
                for queue in self._watchers:
                    if not queue.full():
                        queue.put_nowait(item)
