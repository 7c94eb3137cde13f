"""Calls about sleep to all workers of a replica. They block, and any thread may make them."""

from collections.abc import Mapping
from typing import NamedTuple

import structlog

from services.common.memory_parts import Parts, read_parts, write_parts
from services.scheduler.workers.weights import WorkerWeights
from tokasaurus.worker.v1 import sleep_pb2, worker_pb2

log = structlog.get_logger(__name__)

_SLEEP_TIMEOUT_S = 600.0  # to allocate and fill a copy of the weights in host memory
_WAKE_TIMEOUT_S = 1800.0  # to read dropped weights from a slow disk


class Sleep(NamedTuple):
    """The memory that workers have given back."""

    parts: Parts = frozenset()
    level: int = 1

    def deeper(self, parts: Parts, level: int) -> "Sleep":
        """Return the sleep after ``parts`` have fallen asleep at ``level``."""
        return Sleep(self.parts | parts, max(self.level, level) if self.parts else level)

    def without(self, parts: Parts) -> "Sleep":
        """Return the sleep after ``parts`` have woken."""
        return self._replace(parts=self.parts - parts)


def put_to_sleep(weights: WorkerWeights, parts: Parts, level: int) -> int:
    """Give the memory of ``parts`` back on all workers. Return its size in bytes. Raises ``TokaError``."""
    request = sleep_pb2.SleepRequest(parts=write_parts(parts), level=level)
    responses = weights.call(lambda stub: stub.Sleep, request, _SLEEP_TIMEOUT_S)
    return sum(each.released_bytes for each in responses.values())


def wake(weights: WorkerWeights, parts: Parts) -> None:
    """Take memory for ``parts`` again on all workers. Raises ``TokaError``; then some workers may be awake."""
    weights.call(lambda stub: stub.Wake, sleep_pb2.WakeRequest(parts=write_parts(parts)), _WAKE_TIMEOUT_S)


def settle(weights: WorkerWeights, infos: Mapping[str, worker_pb2.WorkerInfo], last: Sleep | None) -> Sleep:
    """Make all workers sleep alike. Return their sleep.

    ``infos`` has the facts of each worker by address. A worker that has restarted is awake. ``last`` is the sleep that
    the scheduler has recorded. If it is None, parts that are asleep on one worker are put to sleep on all. Raises
    ``TokaError``.
    """
    found = [read_parts(info.asleep) if info.asleep else frozenset() for info in infos.values()]
    wanted = Sleep(frozenset().union(*found)) if last is None else last
    if any(wanted.parts - parts for parts in found):
        released = put_to_sleep(weights, wanted.parts, wanted.level)
        log.info("restarted workers are asleep again", released_bytes=released)
    if awake := frozenset().union(*found) - wanted.parts:
        wake(weights, awake)
    return wanted
