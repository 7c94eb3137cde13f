"""Weights from memory that a trainer shares by CUDA IPC, with one fake worker and with several ranks."""

import asyncio

import grpc
import pytest

from tests.fakes.broadcasts import BAD_HANDLE
from tests.fakes.worker import FakeReplica
from tests.scheduler.service import Service, start
from tests.scheduler.test_broadcasts import check_two_updates, groups, join, receive, stage
from tests.scheduler.test_uploads import refused, uploads
from tests.scheduler.test_weights import SHAPE, commit, fields, versions
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import shared_weights_pb2 as s

CODE = grpc.StatusCode
HANDLE = bytes(range(64))


def copy(service: Service, *names: str, number: int = 1, handle: bytes = HANDLE, **more):
    request = s.CopySharedWeightsRequest(**more)
    request.allocations.add(handle=handle, gpu_uuid="GPU-1")
    for index, name in enumerate(names):
        tensor = request.tensors.add(tensor=weights_pb2.UploadedTensor(name=name, dtype="F32", shape=[number]))
        tensor.copies.add(allocation=0, offset=4 * index)
    return service.stub.CopySharedWeights(request)


async def test_running_samples_continue_with_the_copied_weights():
    async with start(SHAPE) as service:
        await check_two_updates(service, copy)


async def test_all_ranks_copy_from_the_same_memory():
    replica = FakeReplica(SHAPE, tp_size=2, pp_size=2)
    async with start(replica=replica, pp_size=2) as service:
        await copy(service, "norm", "scale", number=5)
        for worker in service.workers:
            [request] = worker.copied
            assert [each.handle for each in request.allocations] == [HANDLE]
            assert [each.copies[0].offset for each in request.tensors] == [0, 4]
        await commit(service, await stage(service, "v5"))
        assert versions(service) == ["v5"] * 4


async def test_a_rank_that_fails_ends_the_update_on_all():
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service:
        await copy(service, "scale")
        first, second = service.workers
        first.on_receive = asyncio.Event().wait

        async def fail() -> None:
            raise TimeoutError

        second.on_receive = fail
        await refused(copy(service, "norm"))
        assert (await refused(stage(service))).code() is CODE.FAILED_PRECONDITION
        assert (uploads(service), versions(service)) == ([[], []], ["", ""])


WRONG = {
    "unknown tensor": (("other",), {}, "other"),
    "twice": (("scale",), {}, "scale"),
    "memory": (("norm",), {"handle": BAD_HANDLE}, "norm"),
    "another version": (("norm",), {"version": "v2"}, "'v1'"),
    "long version": (("norm",), {"version": "v" * 257}, "256"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_call_changes_nothing_and_forgets_the_update(wrong):
    names, more, text = WRONG[wrong]
    async with start(SHAPE) as service:
        await copy(service, "scale", version="v1")
        error = await refused(copy(service, *names, **more))
        assert (error.code(), text in error.details()) == (CODE.INVALID_ARGUMENT, True), error.details()
        assert uploads(service) == [[]]
        assert (await copy(service, "norm")).missing == 1  # a new update
        assert versions(service) == [""]


async def test_an_incomplete_update_is_not_staged_and_names_the_tensor():
    async with start(SHAPE) as service:
        await copy(service, "norm")
        error = await refused(stage(service))
        assert (error.code(), "scale" in error.details()) == (CODE.INVALID_ARGUMENT, True)
        assert uploads(service) == [[]]


async def test_begin_forgets_the_copied_tensors():
    async with start(SHAPE) as service:
        await copy(service, "norm", number=1)
        assert (await copy(service, begin=True)).missing == 2
        assert len(uploads(service)[0]) == 1
        await copy(service, "scale", "norm", number=2)
        await commit(service, await stage(service))
        assert service.worker.weights.fingerprint == 2


async def test_a_caller_that_leaves_ends_the_update():
    async with start(SHAPE) as service:
        waiting = asyncio.Event()

        async def wait() -> None:
            waiting.set()
            await asyncio.Event().wait()

        service.worker.on_receive = wait
        call = copy(service, "norm")
        await waiting.wait()
        call.cancel()
        service.worker.on_receive = lambda: None
        # Calls run one after the other, so this one begins when the update is forgotten.
        assert (await copy(service, "norm")).missing == 1
        assert len(uploads(service)[0]) == 1


async def test_shared_memory_and_a_group_do_not_mix_their_updates():
    async with start(SHAPE) as service:
        await join(service)
        await receive(service, "norm")
        error = await refused(copy(service, "scale"))
        assert (error.code(), "'g' is unfinished" in error.details()) == (CODE.FAILED_PRECONDITION, True)
        await receive(service, "scale")  # the update of the group continues
        await commit(service, await stage(service))
        await copy(service, "norm", number=2)
        error = await refused(receive(service, "scale"))
        assert (error.code(), "shared memory is unfinished" in error.details()) == (CODE.FAILED_PRECONDITION, True)
        assert groups(service) == [[]]
        await copy(service, "scale")  # the update from shared memory continues
        await commit(service, await stage(service, "v2"))
        assert service.worker.weights.fingerprint == 2


async def test_a_worker_that_is_lost_ends_the_update():
    async with start(SHAPE) as service:
        await copy(service, "norm")
        service.worker.crash()
        await service.generate(**fields(2))  # on the new connection
        error = await refused(copy(service, "scale"))
        assert (error.code(), "repeat it" in error.details()) == (CODE.UNAVAILABLE, True)
        await copy(service, "norm", "scale", number=3)
        await commit(service, await stage(service))
        assert service.worker.weights.fingerprint == 3
