"""UploadWeights, with one fake worker and with several ranks."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeReplica, FakeWorker
from tests.scheduler.service import Service, session, start
from tests.scheduler.test_weights import SHAPE, check_spans, commit, fields, stage, versions
from tokasaurus.common.v1 import weights_pb2 as common
from tokasaurus.scheduler.v1 import control_pb2 as c

SIZE = 40  # elements of the tensor "norm", of 4 bytes


def header(version: str = "v1", names=("norm",)) -> c.UploadWeightsRequest:
    tensors = [common.UploadedTensor(name=name, dtype="F32", shape=[SIZE]) for name in names]
    return c.UploadWeightsRequest(header=c.UploadHeader(version=version, tensors=tensors))


def chunk(offset: int, data: bytes) -> c.UploadWeightsRequest:
    return c.UploadWeightsRequest(chunk=common.TensorChunk(name="norm", offset=offset, data=data))


def messages(number: int, version: str | None = None) -> Iterator[c.UploadWeightsRequest]:
    """Yield an upload that fake workers read as the weights ``number``: its first byte."""
    yield header(version or f"v{number}")
    content = bytes([number]) + b"x" * (4 * SIZE - 1)
    for offset in reversed(range(0, 4 * SIZE, 16)):
        yield chunk(offset, content[offset : offset + 16])


async def upload(service: Service, number: int, version: str | None = None) -> str:
    return (await service.stub.UploadWeights(messages(number, version))).update_id


def uploads(service: Service) -> list[list[str]]:
    return [list(worker.uploads) for worker in service.workers]


async def until_uploads(service: Service, *expected: list[str]) -> None:
    """Wait until the workers have the uploads ``expected``. Those of the weights before are removed after a commit."""
    while uploads(service) != list(expected):
        await service.load()


async def update(service: Service, number: int) -> c.CommitWeightsResponse:
    return await commit(service, await upload(service, number))


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_running_samples_continue_with_the_uploaded_weights():
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, **fields(100))
        service.worker.on_commit = service.worker.hold
        for number in (1, 2, 3):
            weights = (await service.pausing(update(service, number))).weights
            assert (weights.version, weights.uploaded) == (f"v{number}", True)
            assert weights.directory == f"/uploads/{weights.update_id}"
            await until_uploads(service, [weights.update_id])
            await service.answer_five()
        service.release()
        await client.finished(0)
        assert check_spans(client.samples[0], 100) == ["", "v1", "v2", "v3"]


async def test_an_upload_is_removed_after_an_update_from_a_directory():
    async with start(SHAPE) as service:
        await update(service, 1)
        await commit(service, await stage(service, 2))
        await until_uploads(service, [])


async def test_a_commit_does_not_wait_until_the_files_of_the_weights_before_are_removed():
    async with start(SHAPE) as service:
        await update(service, 1)
        removing = asyncio.Event()
        service.worker.on_discard = removing.wait
        committed = await update(service, 2)
        assert len(uploads(service)[0]) == 2
        removing.set()
        await until_uploads(service, [committed.weights.update_id])


@pytest.mark.parametrize("one_host", [True, False])
async def test_all_ranks_get_an_upload_and_those_of_one_host_share_it(one_host):
    replica = FakeReplica(SHAPE, tp_size=2, pp_size=2)
    if one_host:
        for worker in replica.workers:
            worker.uploads = replica.workers[0].uploads
    async with start(replica=replica, pp_size=2) as service, session(service) as client:
        await client.submit(0, n=3, **fields(200))
        await client.until(lambda message: message.HasField("outputs"))
        committed = await update(service, 5)
        assert uploads(service) == [[committed.weights.update_id]] * 4
        owners = [worker.uploads[committed.weights.update_id].owner for worker in service.workers]
        assert owners == [worker.address if not one_host else owners[0] for worker in service.workers]
        committed = await update(service, 6)
        await until_uploads(service, *[[committed.weights.update_id]] * 4)
        await client.finished(0, 1, 2)
        assert check_spans(client.samples[0], 200)[-1] in ("v5", "v6")


@pytest.mark.parametrize(
    ("wrong", "field", "text"),
    [
        ([], "header", "must be a header"),
        ([chunk(0, b"x")], "header", "must be a header"),
        ([header(version="")], "header.version", "1 to 256"),
        ([header(version="x" * 257)], "header.version", "1 to 256"),
        ([header(names=["other"])], "header.tensors", "other has no place"),
        ([header(), chunk(0, b"x")], "chunk.name", "norm: bytes are missing"),
        ([header(), header()], "chunk", "expected a chunk"),
        ([*messages(0, "v")][:-1], "chunk.name", "norm: bytes are missing"),
    ],
)
async def test_a_wrong_upload_leaves_no_file_and_changes_nothing(wrong, field, text):
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service:
        await update(service, 1)
        before = uploads(service)
        error = await refused(service.stub.UploadWeights(iter(wrong)))
        assert (error.code(), text in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.details()
        assert field in str(error.trailing_metadata())
        assert uploads(service) == before
        assert [worker.staged for worker in service.workers] == [None, None]
        assert versions(service) == ["v1", "v1"]


async def test_an_upload_whose_staging_fails_is_removed():
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service:

        def fail() -> None:
            raise RuntimeError("the disk is broken")

        service.workers[1].on_stage = fail
        error = await refused(upload(service, 1))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert uploads(service) == [[], []]
        assert [worker.staged for worker in service.workers] == [None, None]


async def test_an_upload_that_is_discarded_or_replaced_is_removed():
    async with start(SHAPE) as service:
        first = await upload(service, 1)
        assert uploads(service) == [[first]]
        second = await upload(service, 2)
        assert uploads(service) == [[second]]
        await service.stub.DiscardWeights(c.DiscardWeightsRequest(update_id=first))  # has no effect
        assert uploads(service) == [[second]]
        await service.stub.DiscardWeights(c.DiscardWeightsRequest(update_id=second))
        assert uploads(service) == [[]]


class Gate:
    """Holds a worker at the first chunk of an upload until ``opened`` is set."""

    def __init__(self, worker: FakeWorker) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        worker.on_chunk = self._wait

    async def _wait(self) -> None:
        self.reached.set()
        await self.opened.wait()


async def test_an_upload_that_is_cancelled_in_the_middle_is_removed():
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service:
        gate = Gate(service.workers[0])
        call = service.stub.UploadWeights(messages(1))
        await gate.reached.wait()
        call.cancel()
        while any(uploads(service)):
            await service.load()
        gate.opened.set()
        await update(service, 2)


async def test_an_upload_whose_caller_leaves_while_it_is_staged_is_removed():
    async with start(SHAPE) as service:
        reading, read = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            reading.set()
            await read.wait()

        service.worker.on_stage = hold
        call = service.stub.UploadWeights(messages(1))
        await reading.wait()
        call.cancel()
        for _ in range(10):
            await service.load()  # answered after the scheduler has seen the cancellation
        read.set()
        while any(uploads(service)):
            await service.load()
        assert service.worker.staged is None


async def test_a_worker_that_is_lost_during_an_upload_ends_the_call():
    async with start(SHAPE) as service:
        gate = Gate(service.worker)
        uploading = asyncio.ensure_future(upload(service, 1))
        await gate.reached.wait()
        service.worker.crash()
        error = await refused(uploading)
        assert (error.code(), "upload" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
        gate.opened.set()
        await service.until_load(lambda load: load.ready)
        await update(service, 2)
        assert [len(each) for each in uploads(service)] == [1]


async def test_a_trainer_is_slowed_down_to_the_speed_of_the_worker():
    """The scheduler does not collect an update in memory while a worker does not read it."""
    async with start(SHAPE) as service:
        gate, sent = Gate(service.worker), []
        mib, count = 1024 * 1024, 256

        async def large() -> AsyncIterator[c.UploadWeightsRequest]:
            tensor = common.UploadedTensor(name="norm", dtype="F32", shape=[count * mib // 4])
            yield c.UploadWeightsRequest(header=c.UploadHeader(version="v1", tensors=[tensor]))
            for number in range(count):
                sent.append(number)
                yield chunk(number * mib, bytes([1]) * mib)

        uploading = asyncio.ensure_future(service.stub.UploadWeights(large()))
        await gate.reached.wait()
        before = -1
        while len(sent) != before:  # until no more chunks are taken
            before = len(sent)
            for _ in range(20):
                await service.load()
        assert len(sent) < count / 2
        gate.opened.set()
        await uploading
        assert len(sent) == count


async def test_a_worker_that_restarts_gets_the_uploaded_weights_again():
    async with start(SHAPE) as service, session(service) as client:
        await update(service, 1)
        await update(service, 2)
        await client.submit(0, **fields(300))
        await client.until(lambda message: message.HasField("outputs"))
        service.worker.crash()
        await client.finished(0)
        assert versions(service) == ["v2"]
        assert service.worker.weights.uploaded
        assert check_spans(client.samples[0], 300) == ["v2"]


async def test_a_worker_whose_upload_is_gone_gets_no_requests():
    async with start(SHAPE) as service:
        await update(service, 1)
        kept = dict(service.worker.uploads)
        service.worker.uploads.clear()
        service.worker.crash()
        load = await service.until_load(lambda load: "cannot be read" in load.not_ready_reason)
        assert not load.ready
        service.worker.uploads.update(kept)
        await service.until_load(lambda load: load.ready)
        assert versions(service) == ["v1"]


@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize("written", [0, 1])
async def test_a_replica_that_is_lost_during_a_commit_has_files_for_its_version(written, one_host):
    """All ranks restart after ``written`` ranks have committed: the files of either version may be needed."""
    replica = FakeReplica(SHAPE, tp_size=2)
    if one_host:
        replica.workers[1].uploads = replica.workers[0].uploads
    async with start(replica=replica) as service:
        await update(service, 1)
        update_id = await upload(service, 2)

        def lose() -> None:
            last.on_commit = lambda: None
            for worker in service.workers:
                worker.crash()
            replica.meet()
            raise RuntimeError("the process is gone")

        last = service.workers[written]
        last.on_commit = lose
        await refused(commit(service, update_id))
        while [len(each) for each in uploads(service)] != [1, 1]:  # until the workers are connected again
            await service.load()
        assert len(set(versions(service))) == 1
        await service.until_load(lambda load: load.ready)
        await update(service, 3)
        assert versions(service) == ["v3", "v3"]


async def test_a_rank_that_did_not_receive_a_commit_gets_the_version_of_the_others():
    """The files of an update are not removed after a commit was sent, although the commit failed."""
    replica = FakeReplica(SHAPE, tp_size=2)
    replica.workers[1].uploads = replica.workers[0].uploads
    async with start(replica=replica) as service:

        def fail() -> None:
            service.workers[0].on_commit = lambda: None
            raise RuntimeError("it is not written")

        service.workers[0].on_commit = fail
        await refused(update(service, 1))
        while versions(service) != ["v1", "v1"]:  # until the workers are connected again
            await service.load()


async def test_a_new_connection_removes_uploads_that_were_not_committed():
    worker = FakeWorker(FakeShape())
    async with start(worker=worker) as service:
        committed = await update(service, 1)
        await upload(service, 2)
        worker.crash()
        await service.generate(**fields(2))
        assert uploads(service) == [[committed.weights.update_id]]
