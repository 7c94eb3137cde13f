"""Sleep and Wake of a replica."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from services.common.boundaries import undo_on_error_async
from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.memory_parts import Parts, part_names, write_parts
from services.scheduler.api.hub import Hub
from services.scheduler.core.request import PauseMode
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.workers import sleep
from services.scheduler.workers.link import WorkerLink
from services.scheduler.workers.sleep import Sleep
from services.scheduler.workers.stream import WorkerStream
from tokasaurus.scheduler.v1 import sleep_pb2

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Sleeps:
    """Puts the workers to sleep and wakes them, one call at a time. Used on the event loop."""

    def __init__(self, hub: Hub, link: WorkerLink, committing: asyncio.Lock) -> None:
        """Create it for the workers of ``link``.

        ``committing`` is held while workers write weights, and by this object while they fall asleep and wake.
        """
        self._hub, self._link, self._committing = hub, link, committing
        self._changing = asyncio.Lock()

    async def sleep(self, parts: Parts, level: int, mode: PauseMode) -> sleep_pb2.SleepResponse:
        """Stop generation, and give the memory of ``parts`` back. Raises ``TokaError``.

        If the caller is cancelled, this continues.
        """
        return await _to_the_end(self._sleep(parts, level, mode))

    async def wake(self, parts: Parts) -> sleep_pb2.WakeResponse:
        """Take memory for ``parts`` again. Raises ``TokaError``. If the caller is cancelled, this continues."""
        return await _to_the_end(self._wake(parts))

    async def _sleep(self, parts: Parts, level: int, mode: PauseMode) -> sleep_pb2.SleepResponse:
        async with self._changing:
            self._connected()
            engine = self._hub.engine
            pause = await asyncio.wrap_future(engine.pause(mode, join=True))
            try:
                async with self._committing:
                    aborted = pause.aborted
                    if mode is PauseMode.ABORT:
                        aborted += await self._hub.abort(None)
                    stream = self._connected()
                    await self._hub.ask(_fall_asleep)
                    released = await self._put_to_sleep(stream, parts, level)
            finally:  # a core that is asleep makes no plan
                resuming = engine.resume(pause.number)
            await asyncio.wrap_future(resuming)
        log.info("asleep", parts=part_names(parts), level=level, released_gib=round(released / 2**30, 2))
        return sleep_pb2.SleepResponse(aborted_samples=aborted, released_bytes=released)

    async def _put_to_sleep(self, stream: WorkerStream, parts: Parts, level: int) -> int:
        """Put the workers to sleep. Return the size of the memory in bytes. If one fails, wake the others again."""
        before = self._link.sleep or Sleep()
        self._link.sleep = before.deeper(parts, level)  # of a worker that restarts meanwhile, too
        async with undo_on_error_async(self._wake_again, stream, before):
            return await asyncio.to_thread(sleep.put_to_sleep, stream.weights, parts, level)

    async def _wake_again(self, stream: WorkerStream, before: Sleep) -> None:
        given = (self._link.sleep or before).parts - before.parts
        with contextlib.suppress(TokaError):  # then they are asleep until the next call of Wake
            if given:
                await asyncio.to_thread(sleep.wake, stream.weights, given)
            await self._awake(before)

    async def _wake(self, parts: Parts) -> sleep_pb2.WakeResponse:
        async with self._changing, self._committing:
            stream = self._connected()
            await asyncio.to_thread(sleep.wake, stream.weights, parts)
            left = (self._link.sleep or Sleep()).without(parts)
            await self._awake(left)
        log.info("woken", parts=part_names(parts), asleep=part_names(left.parts))
        return sleep_pb2.WakeResponse(asleep=write_parts(left.parts))

    async def _awake(self, left: Sleep) -> None:
        """Record that only ``left`` is asleep."""
        self._link.sleep = left
        if not left.parts:
            await self._hub.ask(lambda core: core.wake())

    def _connected(self) -> WorkerStream:
        """Return the connection to workers that can sleep. Raises ``Unavailable`` and ``FailedPrecondition``."""
        if (stream := self._link.stream) is None:
            raise Unavailable("no worker is connected; try again")
        if not stream.info.sleeps:
            raise FailedPrecondition(
                "a worker cannot sleep: its model runs through transformers, or it is older than contract 2.4"
            )
        return stream


async def _to_the_end(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``call``, which continues if the caller is cancelled."""
    return await asyncio.shield(asyncio.create_task(call))


def _fall_asleep(core: Scheduler) -> None:
    if not core.is_paused:
        raise FailedPrecondition("generation was resumed before the sleep had begun; call Sleep again")
    core.sleep()
