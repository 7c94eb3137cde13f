"""Background responses of one gateway: they run without their client, under leases in the store.

A lease is a gateway's name and a time in the response's row, which heartbeats extend. If a gateway ends without notice,
another one finds that the lease has passed and marks the response as failed.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
import structlog

from services.common.errors import Internal, NotFound, Overloaded, StoreUnavailable, TokaError
from services.gateway.store.conversations import Addition
from services.gateway.store.leases import HEARTBEAT_S, LeaseLost
from services.gateway.store.responses import ABANDONED, RUNNING, Responses
from services.gateway.store.tables import FAILED

log = structlog.get_logger(__name__)

MAX_RUNNING = 1024  # background responses of a gateway
MAX_RUNNING_OF_KEY = 256  # of them, those of one API key
MAX_EVENT_BYTES = 256 * 1024 * 1024  # of events that a gateway holds for streams of background responses
_TICK_S = 0.5  # how often events are written to the store
_LOOK_S = 0.25  # how often a stream looks for events that another gateway wrote
_RETRY_S = 1.0  # after the store did not answer
_GRACE_S = 1.0  # timeout of a gateway that ends, for responses whose generation has failed to be stored
_END = b"\n\n"  # of an event

R = TypeVar("R")


class Running:
    """A background response that this gateway generates."""

    def __init__(self, body: dict[str, Any], key_name: str, *, streamed: bool) -> None:
        self.body = body
        self.key_name = key_name
        self.streamed = streamed
        self.events: list[bytes] = []  # by number; the last one is not among them
        self.written = 0  # number of events that are in the store
        self.ended = False
        self.changed = asyncio.Event()  # set, and replaced, when there are new events or the response has ended
        self.task: asyncio.Task[None] | None = None
        self.held = contextlib.ExitStack()  # what is given back when it has ended

    def push(self, data: bytes) -> int:
        """Append the events in ``data``. Returns their bytes."""
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
        """Return the events that are not in the store, as ``Responses.add_events`` takes them."""
        if self.written == len(self.events):
            return None
        return self.body["id"], self.written, b"".join(self.events[self.written :])


class Background:
    """The background responses of one gateway. Lives on its event loop between ``start`` and ``stop``."""

    def __init__(self, records: Responses) -> None:
        self._records = records
        self._running: dict[str, Running] = {}  # by id
        self._event_bytes = 0
        self._tick: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # events of one response are written in order

    def start(self) -> None:
        """Begin to extend leases, and to look for those that have passed."""
        self._tick = asyncio.create_task(self._tick_forever(), name="background responses")

    def check_room(self, key_name: str) -> None:
        """Raise ``Overloaded`` if the gateway generates as many background responses as it may."""
        of_key = Counter(one.key_name for one in self._running.values())[key_name]
        if len(self._running) >= MAX_RUNNING or of_key >= MAX_RUNNING_OF_KEY:
            raise Overloaded(
                f"{of_key} background responses of this caller and {len(self._running)} in all are running, of at most"
                f" {MAX_RUNNING_OF_KEY} and {MAX_RUNNING}; wait for some of them to end",
                retry_after_s=1.0,
            )
        if self._event_bytes > MAX_EVENT_BYTES:
            raise Overloaded(f"{self._event_bytes} bytes of events of background responses are held", retry_after_s=1.0)

    async def begin(self, one: Running, items: bytes, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """Keep the new response ``one`` in the store, and generate it. ``events``: its events, of which the first are
        those of its beginning. ``close`` is called at the end. Raises ``AlreadyExists``, and the store's errors.
        """
        try:
            size = one.push(await anext(events))
            one.written = len(one.events)
            await self._records.begin(one.body, items, one.key_name, b"".join(one.events))
        except BaseException:
            close()
            one.held.close()
            raise
        self._event_bytes += size
        self._running[one.body["id"]] = one
        one.task = asyncio.create_task(self._run(one, events, close), name=f"background {one.body['id']}")

    async def progress(self, one: Running, body: dict[str, Any]) -> None:
        """Keep a new state of ``one``. The answer does not wait for a store that does not answer."""
        one.body = body
        try:
            if not await to_its_end(self._records.progress(body)):
                raise LeaseLost
        except TokaError as error:
            log.warning("state of a background response not stored", id=body["id"], reason=error.message)

    async def end(self, one: Running, body: dict[str, Any], addition: Addition | None) -> None:
        """Keep the final state of ``one``, however long the store takes. Raises ``LeaseLost`` if it was cancelled,
        deleted, or marked as failed."""
        while True:
            try:
                await to_its_end(self._write_events([one]))
                try:
                    kept = await to_its_end(self._records.end(body, one.key_name, addition))
                except NotFound:  # the conversation was deleted
                    addition, body["conversation"] = None, None
                    continue
            except TokaError as error:
                if not isinstance(error, StoreUnavailable):  # which the log has
                    log.warning("background response waits for the store", id=body["id"], reason=error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            if not kept:
                raise LeaseLost
            one.body = body
            return

    def drop(self, response_id: str) -> None:
        """Stop to generate a response that was cancelled or deleted, if this gateway generates it."""
        one = self._running.get(response_id)
        if one is not None and one.task is not None:
            one.task.cancel()

    async def idle(self) -> None:
        """Wait until this gateway generates no background response."""
        while self._running:
            await asyncio.wait([one.task for one in self._running.values() if one.task is not None])

    async def stop(self) -> None:
        """End, and mark the responses that still run as failed."""
        if self._tick is not None:
            self._tick.cancel()
            await asyncio.gather(self._tick, return_exceptions=True)
        left = list(self._running.values())
        tasks = [one.task for one in left if one.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in left:
            if one.body["status"] in RUNNING:
                with contextlib.suppress(TokaError):
                    await self._records.end(_failed(one.body, ABANDONED), one.key_name, None)

    async def follow(self, response_id: str, key_name: str, number: int) -> AsyncIterator[bytes]:
        """Yield the events of a streamed background response from ``number`` on, as they come, to the last one.

        Raises ``NotFound`` if the response is deleted meanwhile.
        """
        while (one := self._running.get(response_id)) is not None and one.key_name == key_name and not one.ended:
            changed = one.changed
            if number < len(one.events):
                new, number = one.events[number:], len(one.events)
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
            await asyncio.sleep(_LOOK_S)

    async def _run(self, one: Running, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        with one.held:
            try:
                async for data in events:
                    if one.body["status"] in RUNNING:  # the last event is made of the stored response
                        self._event_bytes += one.push(data)
            except LeaseLost:
                log.info("background response given up", id=one.body["id"])
            except Exception:
                log.exception("background response failed", id=one.body["id"])
                await self._fail(one)
            finally:
                close()
                del self._running[one.body["id"]]
                self._event_bytes -= sum(map(len, one.events))
                one.ended = True
                one.wake()

    async def _fail(self, one: Running) -> None:
        try:
            await self.end(one, _failed(one.body, Internal.logged().message), None)
        except LeaseLost:
            log.info("background response given up", id=one.body["id"])
        except Exception:  # its lease will pass
            log.exception("background response not stored", id=one.body["id"])

    async def _tick_forever(self) -> None:
        beat_at = 0.0
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() >= beat_at:
                    beat_at = loop.time() + HEARTBEAT_S
                    await self._beat()
                await self._write_events(list(self._running.values()))
            except StoreUnavailable:
                pass  # the log has it
            except TokaError as error:
                log.warning("background responses wait for the store", reason=error.message)
            except Exception:
                log.exception("background responses cannot be kept up")
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
            new = [(one, len(one.events), rows) for one in some if (rows := one.unwritten()) is not None]
            if new:
                await self._records.add_events([rows for _, _, rows in new])
            for one, count, _ in new:
                one.written = count


async def to_its_end(work: Coroutine[Any, Any, R]) -> R:
    """Await ``work``, which goes on if the caller is cancelled, so that no transaction is cut in the middle."""
    return await asyncio.shield(asyncio.create_task(work))


def last_event(body: dict[str, Any], number: int) -> bytes:
    """Return the event that ends the stream of the response ``body``."""
    kind = f"response.{body['status']}"
    document = {"type": kind, "sequence_number": number, "response": body}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document))


def _failed(body: dict[str, Any], message: str) -> dict[str, Any]:
    return body | {"status": FAILED, "error": {"code": "server_error", "message": message}}
