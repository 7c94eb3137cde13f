"""Background responses of one gateway, which are generated without a connected client, under leases in the store.

A lease is a gateway's name and a time in the response's row. Heartbeats extend it. If a gateway ends without notice,
another gateway finds the expired lease and marks the response as failed.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
import structlog

from services.common.boundaries import errors_logged, undo_on_error
from services.common.errors import Internal, NotFound, Overloaded, StoreUnavailable, TokaError
from services.gateway.store.conversations import Addition
from services.gateway.store.leases import HEARTBEAT_S, LeaseLost
from services.gateway.store.responses import ABANDONED, RUNNING, Responses
from services.gateway.store.tables import FAILED

log = structlog.get_logger(__name__)

MAX_RUNNING = 1024  # background responses of a gateway
MAX_RUNNING_OF_KEY = 256  # background responses of one API key
MAX_EVENT_BYTES = 256 * 1024 * 1024  # events of background responses that a gateway keeps in memory for streams
_TICK_S = 0.5  # interval of writes of events to the store
_POLL_S = 0.25  # interval in which a stream reads events that another gateway writes
_RETRY_S = 1.0  # pause after an error of the store
_GRACE_S = 1.0  # time in which a stopping gateway waits for its responses to be stored
_END = b"\n\n"  # of an event

R = TypeVar("R")


class Running:
    """A background response that this gateway generates."""

    def __init__(self, body: dict[str, Any], key_name: str, *, streamed: bool) -> None:
        self.body = body
        self.key_name = key_name
        self.streamed = streamed
        self.events: list[bytes] = []  # by number, without the last event
        self.written = 0  # number of events that are in the store
        self.ended = False
        self.changed = asyncio.Event()  # set and replaced at new events and at the end
        self.task: asyncio.Task[None] | None = None
        self.resources = contextlib.ExitStack()  # released when the response has ended

    def push(self, data: bytes) -> int:
        """Append the events in ``data``. Return their size in bytes."""
        if not self.streamed:
            return 0
        self.events += [event + _END for event in data.split(_END)[:-1]]
        self.wake()
        return len(data)

    def wake(self) -> None:
        """Wake the streams that follow the response."""
        self.changed.set()
        self.changed = asyncio.Event()

    def unwritten(self) -> tuple[str, int, bytes] | None:
        """Return the events that are not in the store, as an element for ``Responses.add_events``."""
        if self.written == len(self.events):
            return None
        return self.body["id"], self.written, b"".join(self.events[self.written :])


class Background:
    """The background responses of one gateway. Runs on its event loop between ``start`` and ``stop``."""

    def __init__(self, records: Responses) -> None:
        self._records = records
        self._running: dict[str, Running] = {}  # by id
        self._event_bytes = 0
        self._tick: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # events of one response are written in order

    def start(self) -> None:
        """Start to extend leases and to look for expired ones."""
        self._tick = asyncio.create_task(self._tick_forever(), name="background responses")

    def check_room(self, key_name: str) -> None:
        """Raise ``Overloaded`` if the gateway or the key has the maximum of background responses."""
        of_key = Counter(running.key_name for running in self._running.values())[key_name]
        if len(self._running) >= MAX_RUNNING or of_key >= MAX_RUNNING_OF_KEY:
            raise Overloaded(
                f"{of_key} background responses of this caller and {len(self._running)} in all are running, of at most"
                f" {MAX_RUNNING_OF_KEY} and {MAX_RUNNING}; wait for some of them to end",
                retry_after_s=1.0,
            )
        if self._event_bytes > MAX_EVENT_BYTES:
            raise Overloaded(
                f"{self._event_bytes} bytes of events of background responses are in memory", retry_after_s=1.0
            )

    async def begin(
        self, running: Running, items: bytes, events: AsyncIterator[bytes], close: Callable[[], None]
    ) -> None:
        """Store the new response ``running``, and generate it.

        The first element of ``events`` has the response's first events. ``close`` is called at the end. Raises
        ``AlreadyExists``, and the store's errors.
        """
        with undo_on_error(running.resources.close), undo_on_error(close):
            size = running.push(await anext(events))
            running.written = len(running.events)
            await self._records.begin(running.body, items, running.key_name, b"".join(running.events))
        self._event_bytes += size
        self._running[running.body["id"]] = running
        running.task = asyncio.create_task(self._run(running, events, close), name=f"background {running.body['id']}")

    async def progress(self, running: Running, body: dict[str, Any]) -> None:
        """Store a new state of ``running``. Errors of the store are only logged."""
        running.body = body
        try:
            if not await finish_shielded(self._records.progress(body)):
                raise LeaseLost
        except TokaError as error:
            log.warning("state of a background response not stored", id=body["id"], reason=error.message)

    async def end(self, running: Running, body: dict[str, Any], addition: Addition | None) -> None:
        """Store the final state of ``running``. Retry until the store is available.

        Raises ``LeaseLost`` if the response was cancelled, deleted, or marked as failed.
        """
        while True:
            try:
                await finish_shielded(self._write_events([running]))
                try:
                    kept = await finish_shielded(self._records.end(body, running.key_name, addition))
                except NotFound:  # the conversation was deleted
                    addition, body["conversation"] = None, None
                    continue
            except TokaError as error:
                if not isinstance(error, StoreUnavailable):  # logged by the health
                    log.warning("background response waits for the store", id=body["id"], reason=error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            if not kept:
                raise LeaseLost
            running.body = body
            return

    def drop(self, response_id: str) -> None:
        """Stop generating a response that was cancelled or deleted, if this gateway generates it."""
        running = self._running.get(response_id)
        if running is not None and running.task is not None:
            running.task.cancel()

    async def idle(self) -> None:
        """Wait until this gateway generates no background response."""
        while self._running:
            await asyncio.wait([running.task for running in self._running.values() if running.task is not None])

    async def stop(self) -> None:
        """Stop, and mark the responses that still run as failed."""
        if self._tick is not None:
            self._tick.cancel()
            await asyncio.gather(self._tick, return_exceptions=True)
        left = list(self._running.values())
        tasks = [running.task for running in left if running.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in left:
            if running.body["status"] in RUNNING:
                with contextlib.suppress(TokaError):
                    await self._records.end(_failed(running.body, ABANDONED), running.key_name, None)

    async def follow(self, response_id: str, key_name: str, number: int) -> AsyncIterator[bytes]:
        """Yield the events of a streamed background response, from event ``number`` to its end.

        Raises ``NotFound`` if the response is deleted meanwhile.
        """
        while (
            (running := self._running.get(response_id)) is not None
            and running.key_name == key_name
            and not running.ended
        ):
            changed = running.changed
            if number < len(running.events):
                new, number = running.events[number:], len(running.events)
                yield b"".join(new)
            else:
                await changed.wait()
        while True:
            kept = await self._records.get(response_id, key_name)
            for first, data in await self._records.events(response_id, number):
                events = data.split(_END)[:-1]
                if new := events[max(0, number - first) :]:
                    yield b"".join(event + _END for event in new)
                number = max(number, first + len(events))
            if kept.status not in RUNNING:
                yield last_event(orjson.loads(kept.body), number)
                return
            await asyncio.sleep(_POLL_S)

    async def _run(self, running: Running, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        with running.resources:
            try:
                async for data in events:
                    if running.body["status"] in RUNNING:  # the last event is built from the stored response
                        self._event_bytes += running.push(data)
            except LeaseLost:
                log.info("background response given up", id=running.body["id"])
            except Exception:
                log.exception("background response failed", id=running.body["id"])
                await self._fail(running)
            finally:
                close()
                del self._running[running.body["id"]]
                self._event_bytes -= sum(map(len, running.events))
                running.ended = True
                running.wake()

    async def _fail(self, running: Running) -> None:
        with errors_logged(log, "background response not stored", id=running.body["id"]):  # its lease will expire
            try:
                await self.end(running, _failed(running.body, Internal.logged().message), None)
            except LeaseLost:
                log.info("background response given up", id=running.body["id"])

    async def _tick_forever(self) -> None:
        beat_at = 0.0
        loop = asyncio.get_running_loop()
        while True:
            with errors_logged(log, "heartbeat of background responses failed"):
                try:
                    if loop.time() >= beat_at:
                        beat_at = loop.time() + HEARTBEAT_S
                        await self._beat()
                    await self._write_events(list(self._running.values()))
                except StoreUnavailable:
                    pass  # logged by the health
                except TokaError as error:
                    log.warning("background responses wait for the store", reason=error.message)
            await asyncio.sleep(_TICK_S)

    async def _beat(self) -> None:
        began = dict(self._running)
        if began:
            kept = await self._records.beat(began)
            for response_id in began.keys() - kept:
                self.drop(response_id)
        while await self._records.fail_abandoned():
            pass

    async def _write_events(self, some: list[Running]) -> None:
        async with self._writing:
            new = [
                (running, len(running.events), rows) for running in some if (rows := running.unwritten()) is not None
            ]
            if new:
                await self._records.add_events([rows for _, _, rows in new])
            for running, count, _ in new:
                running.written = count


async def finish_shielded(work: Coroutine[Any, Any, R]) -> R:
    """Await ``work`` in its own task, so that a cancelled caller does not interrupt a transaction."""
    return await asyncio.shield(asyncio.create_task(work))


def last_event(body: dict[str, Any], number: int) -> bytes:
    """Return the event that ends the stream of the response ``body``."""
    kind = f"response.{body['status']}"
    document = {"type": kind, "sequence_number": number, "response": body}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document))


def _failed(body: dict[str, Any], message: str) -> dict[str, Any]:
    return body | {"status": FAILED, "error": {"code": "server_error", "message": message}}
