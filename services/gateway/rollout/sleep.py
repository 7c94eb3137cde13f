"""Sleep and wake of all schedulers' workers."""

from typing import Literal, get_args

from services.common.memory_parts import MemoryPart, Parts, part_names, read_parts, write_parts
from services.gateway.engine.each_scheduler import call_all
from services.gateway.engine.fleet import Fleet
from services.gateway.rollout.control import MODES, PauseMode, aborting
from tokasaurus.scheduler.v1 import observe_pb2, sleep_pb2

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = get_args(Tag)

_SINCE = "1.14"  # version of the contract


def parts_of(tags: list[Tag] | None) -> Parts:
    """Return the parts that ``tags`` name. No tags name all parts."""
    return read_parts(MemoryPart[tag.upper()] for tag in tags or ())


async def sleep(fleet: Fleet, parts: Parts, level: int, mode: PauseMode) -> tuple[int, int]:
    """Put all workers to sleep. Return the number of samples that ``abort`` ended, and the bytes that were given back.

    Raises the error of a scheduler. The others are asleep then: repeat the call, or wake them.
    """
    request = sleep_pb2.SleepRequest(level=level, mode=MODES[mode], parts=write_parts(parts))
    with aborting(fleet, mode) as queued:
        responses = await call_all(fleet.replicas, lambda stub: stub.Sleep, request, since=_SINCE, timeout_s=None)
    return queued + sum(each.aborted_samples for each in responses), sum(each.released_bytes for each in responses)


async def wake(fleet: Fleet, parts: Parts) -> list[str]:
    """Wake all workers. Return the tags of the parts that are still asleep at a scheduler.

    Raises the error of a scheduler.
    """
    request = sleep_pb2.WakeRequest(parts=write_parts(parts))
    responses = await call_all(fleet.replicas, lambda stub: stub.Wake, request, since=_SINCE, timeout_s=None)
    return part_names(MemoryPart(part) for response in responses for part in response.asleep)


async def is_sleeping(fleet: Fleet) -> bool:
    """Return whether every scheduler is asleep, in whole or in part. Raises the error of a scheduler."""
    responses = await call_all(fleet.replicas, lambda stub: stub.GetLoad, observe_pb2.GetLoadRequest(), since=_SINCE)
    return all(each.load.asleep for each in responses)
