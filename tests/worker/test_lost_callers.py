"""A call that waits behind another one does not run after its scheduler was lost."""

import asyncio
import shutil
import threading

import grpc
import pytest

from services.worker.boot.sources import NativeSource
from services.worker.engine.sleep import Sleeper
from services.worker.engine.weights import ModelWeights
from tests.gateway.deployment import eventually_async
from tests.worker.scheduler import status_of
from tests.worker.test_weights import stage
from tokasaurus.common.v1 import memory_pb2
from tokasaurus.worker.v1 import sleep_pb2, tensor_pb2, weights_pb2

CACHE = memory_pb2.MEMORY_PART_KV_CACHE
# By name: the method that runs the call, and the call.
CALLS = {
    "sleep": (Sleeper, lambda stub: stub.Sleep(sleep_pb2.SleepRequest(level=1))),
    "wake": (Sleeper, lambda stub: stub.Wake(sleep_pb2.WakeRequest())),
    "commit": (ModelWeights, lambda stub: stub.CommitWeights(weights_pb2.CommitWeightsRequest(update_id="u"))),
}


class Method:
    """A wrapped method that records its arguments, and sets events when it begins and ends."""

    def __init__(self, monkeypatch, owner: type, name: str) -> None:
        self.begun, self.ended, self.arguments = threading.Event(), threading.Event(), ()
        original = getattr(owner, name)

        def observed(instance, *arguments):
            self.arguments = arguments
            self.begun.set()
            try:
                return original(instance, *arguments)
            finally:
                self.ended.set()

        monkeypatch.setattr(owner, name, observed)


@pytest.fixture
def slow_read(monkeypatch):
    """``begun`` is set by a call of ReadTensor, which holds up all changes until ``may_end`` is set."""
    begun, may_end = threading.Event(), threading.Event()
    read_rows = NativeSource.read_rows

    def slow(*arguments):
        begun.set()
        may_end.wait()
        return read_rows(*arguments)

    monkeypatch.setattr(NativeSource, "read_rows", slow)
    yield begun, may_end
    may_end.set()


@pytest.mark.parametrize("lost", ["replaced", "disconnected"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_does_not_run_after_its_scheduler_was_lost(
    name, lost, worker, connect, checkpoint, tmp_path, slow_read, monkeypatch
):
    (owner, call), (reading, may_end) = CALLS[name], slow_read
    shutil.copytree(checkpoint(seed=1), tmp_path / "new")
    address = await worker(weight_directories=(str(tmp_path),))
    first, second = await connect(address), await connect(address)
    await first.connect()
    await stage(first, tmp_path / "new")
    if name == "wake":
        await first.stub.Sleep(sleep_pb2.SleepRequest(level=1, parts=[CACHE]))
    before = await state(first)

    method = Method(monkeypatch, owner, name)
    read = first.stub.ReadTensor(tensor_pb2.ReadTensorRequest(name="model.norm.weight", rows=1))
    await asyncio.to_thread(reading.wait)
    waiting = call(first.stub)
    await asyncio.to_thread(method.begun.wait)
    if lost == "replaced":
        await second.connect()
    else:
        waiting.cancel()
        await eventually_async(lambda: not method.arguments[-1]())
    may_end.set()
    await read
    await asyncio.to_thread(method.ended.wait)
    if lost == "replaced":
        code, details = await status_of(waiting)
        assert (code, "lost or replaced" in details) == (grpc.StatusCode.UNAVAILABLE, True)
    assert await state(second) == before


async def state(scheduler) -> tuple[list[int], str]:
    """Return the parts that are asleep, and the version of the weights."""
    info = await scheduler.info()
    return list(info.asleep), info.weights.version
