"""Groups with trainers and the weights received from them, with one fake worker and with several ranks."""

import asyncio

import grpc
import pytest

from tests.fakes.worker import FakeReplica
from tests.scheduler.service import Service, session, start
from tests.scheduler.test_uploads import refused, until_uploads, uploads
from tests.scheduler.test_weights import SHAPE, check_spans, commit, fields, versions
from tokasaurus.common.v1 import weights_pb2 as common
from tokasaurus.scheduler.v1 import broadcast_pb2 as b
from tokasaurus.scheduler.v1 import control_pb2 as c

GROUP = common.UpdateGroup(name="g", master_address="127.0.0.1", master_port=1, first_rank=1, world_size=9)
CODE = grpc.StatusCode


async def join(service: Service, name: str = "g") -> None:
    group = common.UpdateGroup()
    group.CopyFrom(GROUP)
    group.name = name
    await service.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group))


def receive(service: Service, *names: str, number: int = 1, group: str = "g", **more):
    tensors = [common.UploadedTensor(name=name, dtype="F32", shape=[number]) for name in names]
    return service.stub.ReceiveWeights(b.ReceiveWeightsRequest(group=group, tensors=tensors, **more))


async def stage(service: Service, version: str = "v1") -> str:
    return (await service.stub.StageWeights(c.StageWeightsRequest(received=True, version=version))).update_id


def groups(service: Service) -> list[list[str]]:
    return [list(worker.groups) for worker in service.workers]


async def check_two_updates(service: Service, send) -> None:
    """Replace the weights twice while a sample runs. ``send(service, names..., number=)`` sends tensors."""
    async with session(service) as client:
        await service.begin(client, **fields(100))
        service.worker.on_commit = service.worker.hold
        for number in (1, 2):
            response = await send(service, "scale")
            assert (response.missing, response.first_missing) == (1, "norm")
            assert (await send(service, "norm", number=number)).missing == 0
            update_id = await stage(service, f"v{number}")
            weights = (await service.pausing(commit(service, update_id))).weights
            assert (weights.version, weights.uploaded) == (f"v{number}", True)
            await until_uploads(service, [update_id])
            await service.answer_five()
        service.release()
        await client.finished(0)
        assert check_spans(client.samples[0], 100) == ["", "v1", "v2"]


async def test_running_samples_continue_with_the_received_weights():
    async with start(SHAPE) as service:
        await join(service)
        await check_two_updates(service, receive)


@pytest.mark.parametrize("one_host", [True, False])
async def test_all_ranks_receive_and_a_worker_that_crashes_gets_the_files(one_host):
    replica = FakeReplica(SHAPE, tp_size=2, pp_size=2)
    if one_host:
        for worker in replica.workers:
            worker.uploads = replica.workers[0].uploads
    async with start(replica=replica, pp_size=2) as service:
        await join(service)
        assert groups(service) == [["g"]] * 4
        await receive(service, "norm", "scale", number=5)
        update_id = await stage(service, "v5")
        assert (await commit(service, update_id)).weights.version == "v5"
        owners = [worker.uploads[update_id].owner for worker in service.workers]
        assert owners == [worker.address if not one_host else owners[0] for worker in service.workers]
        assert versions(service) == ["v5"] * 4


async def test_a_rank_that_fails_ends_the_update_on_all_and_closes_the_group():
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service:
        await join(service)
        await receive(service, "scale")
        first, second = service.workers
        first.on_receive = asyncio.Event().wait  # it waits for a tensor that never arrives
        second.groups.clear()
        error = await refused(receive(service, "norm"))
        assert (error.code(), f"worker {second.address}" in error.details()) == (CODE.FAILED_PRECONDITION, True)
        assert groups(service) == [[], []]
        assert (await refused(stage(service))).code() is CODE.FAILED_PRECONDITION
        assert uploads(service) == [[], []]
        assert versions(service) == ["", ""]


WRONG = {
    "unknown tensor": (("other",), {}, CODE.INVALID_ARGUMENT, "other"),
    "twice": (("scale",), {}, CODE.INVALID_ARGUMENT, "scale"),
    "unknown group": (("norm",), {"group": "h"}, CODE.FAILED_PRECONDITION, "'g' is unfinished"),
    "another version": (("norm",), {"version": "v2"}, CODE.INVALID_ARGUMENT, "'v1'"),
    "long version": (("norm",), {"version": "v" * 257}, CODE.INVALID_ARGUMENT, "256"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_bucket_changes_nothing(wrong):
    names, more, code, text = WRONG[wrong]
    async with start(SHAPE) as service:
        await join(service)
        await receive(service, "scale", version="v1")
        error = await refused(receive(service, *names, **more))
        assert (error.code(), text in error.details()) == (code, True), error.details()
        if wrong == "unknown group":  # another trainer does not end the update
            await receive(service, "norm")
            await commit(service, await stage(service))
            assert versions(service) == ["v1"]
            return
        assert groups(service) == [[]]
        assert uploads(service) == [[]]
        await join(service)
        assert (await receive(service, "norm")).missing == 1  # a new update
        assert versions(service) == [""]


async def test_an_incomplete_update_is_not_staged_and_names_the_tensor():
    async with start(SHAPE) as service:
        assert (await refused(stage(service))).code() is CODE.FAILED_PRECONDITION
        await join(service)
        await receive(service, "norm")
        error = await refused(stage(service))
        assert (error.code(), "scale" in error.details()) == (CODE.INVALID_ARGUMENT, True)
        assert uploads(service) == [[]]
        request = c.StageWeightsRequest(received=True, directory="/weights/1", version="v1")
        assert (await refused(service.stub.StageWeights(request))).code() is CODE.INVALID_ARGUMENT


async def test_begin_forgets_what_was_received():
    async with start(SHAPE) as service:
        await join(service)
        await receive(service, "norm", number=1)
        assert (await receive(service, begin=True)).missing == 2
        assert len(uploads(service)[0]) == 1
        await receive(service, "scale", "norm", number=2)
        await commit(service, await stage(service))
        assert service.worker.weights.fingerprint == 2


async def test_a_caller_that_leaves_ends_the_update_and_the_group():
    async with start(SHAPE) as service:
        await join(service)
        waiting = asyncio.Event()

        async def wait() -> None:
            waiting.set()
            await asyncio.Event().wait()

        service.worker.on_receive = wait
        call = receive(service, "norm")
        await waiting.wait()
        call.cancel()
        service.worker.on_receive = lambda: None
        # Calls of one update run one after the other, so this one begins when the group is closed.
        assert (await refused(receive(service, "norm"))).code() is CODE.FAILED_PRECONDITION
        assert (groups(service), uploads(service)) == ([[]], [[]])


async def test_a_group_that_does_not_form_is_left_everywhere():
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service:
        service.workers[0].on_join = asyncio.Event().wait

        async def fail() -> None:
            raise TimeoutError

        service.workers[1].on_join = fail
        await refused(service.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=GROUP)))
        assert groups(service) == [[], []]


async def test_a_new_group_of_the_same_name_outlives_the_end_of_a_call_of_the_old_one():
    async with start(SHAPE) as service:
        await join(service)
        waiting, lost = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            waiting.set()
            await lost.wait()
            raise TimeoutError

        service.worker.on_receive = wait
        call = receive(service, "norm")
        await waiting.wait()
        await join(service)
        service.worker.on_receive = lambda: None
        lost.set()
        await refused(call)
        assert groups(service) == [["g"]]
        await receive(service, "norm", "scale")
        await commit(service, await stage(service))
        assert versions(service) == ["v1"]


async def test_a_worker_that_is_lost_ends_the_update():
    async with start(SHAPE) as service:
        await join(service)
        await receive(service, "norm")
        service.worker.crash()
        await service.generate(**fields(2))  # on the new connection
        await join(service)
        assert (await receive(service, "norm")).missing == 1
        assert (await service.stub.LeaveUpdateGroup(b.LeaveUpdateGroupRequest(name="g"))).left
        assert not (await service.stub.LeaveUpdateGroup(b.LeaveUpdateGroupRequest(name="g"))).left
        assert (await refused(stage(service))).code() is CODE.FAILED_PRECONDITION
