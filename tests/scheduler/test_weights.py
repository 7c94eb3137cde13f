"""StageWeights, CommitWeights, DiscardWeights and GetWeights: new weights under load, and workers that are lost."""

import asyncio
import contextlib
import weakref
from types import SimpleNamespace

import grpc
import pytest

from services.common.errors import Unavailable
from services.scheduler.core.request import PauseMode
from services.scheduler.workers.weights import WorkerWeights
from tests.fakes.model import FakeShape, continuation
from tests.fakes.worker import FakeReplica
from tests.scheduler.service import PROMPT, Service, session, start
from tokasaurus.scheduler.v1 import control_pb2 as c
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.worker.v1 import weights_pb2 as w

SHAPE = FakeShape(max_slots=4)


def fields(max_tokens: int, seed: int = 3) -> dict:
    stopping = g.Stopping(max_tokens=max_tokens, ignore_eos=True)
    return {"tokens": g.TokenPrompt(token_ids=PROMPT), "stopping": stopping, "sampling": g.Sampling(seed=seed)}


async def stage(service: Service, number: int | str, **more) -> str:
    request = c.StageWeightsRequest(directory=f"/weights/{number}", **more)
    return (await service.stub.StageWeights(request)).update_id


async def commit(service: Service, update_id: str, mode: str = "KEEP", **more) -> c.CommitWeightsResponse:
    mode = c.PauseMode.Value(f"PAUSE_MODE_{mode}")
    return await service.stub.CommitWeights(c.CommitWeightsRequest(update_id=update_id, mode=mode, **more))


async def update(service: Service, number: int, mode: str = "KEEP", **more) -> c.CommitWeightsResponse:
    return await commit(service, await stage(service, number, version=f"v{number}"), mode, **more)


def versions(service: Service) -> list[str]:
    return [worker.weights.version for worker in service.workers]


async def mode_of(service: Service) -> PauseMode | None:
    return await asyncio.wrap_future(service.server.engine.ask(lambda core: core.state.queue.pause))


def check_spans(sample, max_tokens: int, seed: int = 3) -> list[str]:
    """The versions of a sample's tokens, each of which must be the one that its version chooses."""
    tokens, at = sample.tokens, 0
    assert sum(span.tokens for span in sample.finish.weights) == len(tokens) == max_tokens
    for span in sample.finish.weights:
        number = int(span.version.removeprefix("v") or 0)
        expected = continuation(SHAPE, [*PROMPT, *tokens[:at]], span.tokens, seed=seed, weights=number)
        assert tokens[at : at + span.tokens] == expected
        at += span.tokens
    return [span.version for span in sample.finish.weights]


async def check_paused_after(committing, pausing, service: Service, client) -> None:
    """Check that ``pausing`` outlives ``committing``, and that sample 0 has tokens of both weights after a resume."""
    await committing
    await pausing
    assert (await service.load()).paused
    await service.stub.Resume(c.ResumeRequest())
    await client.finished(0)
    assert check_spans(client.samples[0], 60) == ["", "v1"]


@pytest.mark.parametrize("recompute", [False, True])
async def test_kept_samples_continue_with_the_new_weights_and_name_both(recompute):
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, n=6, **fields(100))  # two of the samples wait
        service.worker.on_commit = service.worker.hold
        for number in (1, 2, 3):
            committed = await service.pausing(update(service, number, recompute=recompute))
            assert (committed.weights.version, committed.weights.directory) == (f"v{number}", f"/weights/{number}")
            assert committed.paused_ns > 0
            await service.answer_five()
        service.release()
        await client.finished(*range(6))
        assert check_spans(client.samples[0], 100) == ["", "v1", "v2", "v3"]
        later = (await service.generate(**fields(10)))[0]
        assert [(span.version, span.tokens) for span in later.finish.weights] == [("v3", 10)]
        assert later.tokens == continuation(SHAPE, PROMPT, 10, seed=3, weights=3)


async def test_without_an_update_no_version_is_named(service):
    assert not (await service.generate(**fields(10)))[0].finish.weights
    weights = await service.stub.GetWeights(c.GetWeightsRequest(checksums=True))
    assert (weights.weights.version, len(weights.ranks)) == ("", 1)
    assert [tensor.name for tensor in weights.ranks[0].tensors] == ["norm"]


async def test_requests_that_finish_first_see_only_the_old_weights():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, n=6, **fields(30))
        await client.decided(0)
        update_id = await stage(service, 1, version="v1")
        committing = asyncio.ensure_future(commit(service, update_id, "WAIT"))
        await service.until_load(lambda load: load.paused)
        await client.submit(9, **fields(5))
        await client.decided(9)
        service.worker.release()
        await committing
        await client.finished(*range(6), 9)
        assert all(not client.samples[handle].finish.weights for handle in range(6))
        assert check_spans(client.samples[9], 5) == ["v1"]


async def test_aborted_samples_keep_the_tokens_of_the_old_weights():
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, **fields(2000))
        assert (await service.pausing(update(service, 1, "ABORT"))).aborted_samples == 1
        await client.finished(0)
        assert client.samples[0].finish.reason == g.FINISH_REASON_ABORTED
        tokens = client.samples[0].tokens
        assert tokens == continuation(SHAPE, PROMPT, len(tokens), seed=3)


async def test_cached_prompts_are_computed_again_with_the_new_weights():
    async with start(SHAPE) as service:
        for number, cached in ((0, 0), (0, 32), (1, 0), (0, 32)):
            if number:
                await update(service, number)
            assert (await service.generate(**fields(4)))[0].finish.usage.cached_prompt_tokens == cached


async def test_all_ranks_change_between_the_same_plans():
    replica = FakeReplica(SHAPE, tp_size=2, pp_size=2)
    async with start(replica=replica, pp_size=2) as service, session(service) as client:
        await service.begin(client, n=3, **fields(60))
        answered = []
        for worker in service.workers:
            worker.on_commit = lambda worker=worker: answered.append(worker.answered)
        await service.pausing(update(service, 5))
        assert len(answered) == 4
        assert len(set(answered)) == 1
        await client.finished(0, 1, 2)
        assert check_spans(client.samples[0], 60) == ["", "v5"]


async def test_a_wrong_update_is_staged_on_no_rank():
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service:
        update_id = await stage(service, 1)
        service.workers[1].disk["/weights/2"] = None
        with pytest.raises(grpc.aio.AioRpcError, match=r"model.norm.weight") as refused:
            await stage(service, 2)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert service.workers[1].address in refused.value.details()
        assert [worker.staged for worker in service.workers] == [None, None]
        with pytest.raises(grpc.aio.AioRpcError, match=r"not staged"):
            await commit(service, update_id)
        service.workers[1].disk["/weights/3"] = 33
        with pytest.raises(grpc.aio.AioRpcError, match=r"read different weights"):
            await stage(service, 3)
        assert [worker.staged for worker in service.workers] == [None, None]
        assert versions(service) == ["", ""]


async def test_of_two_trainers_the_one_that_staged_last_commits():
    async with start(SHAPE) as service:
        first, second = await stage(service, 1), await stage(service, 2)
        with pytest.raises(grpc.aio.AioRpcError, match=r"another update was staged") as refused:
            await commit(service, first)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await service.stub.DiscardWeights(c.DiscardWeightsRequest(update_id=first))  # has no effect
        assert (await commit(service, second)).weights.version == "/weights/2"  # the default
        with pytest.raises(grpc.aio.AioRpcError, match=r"not staged"):
            await commit(service, second)
        third = await stage(service, 3)
        await service.stub.DiscardWeights(c.DiscardWeightsRequest(update_id=third))
        with pytest.raises(grpc.aio.AioRpcError, match=r"not staged"):
            await commit(service, third)


@pytest.mark.parametrize(("fields", "field"), [({"version": ""}, "version"), ({"version": "x" * 257}, "version")])
async def test_a_wrong_call_names_the_field(service, fields, field):
    with pytest.raises(grpc.aio.AioRpcError, match=r"1 to 256 characters"):
        await stage(service, 1, **fields)


async def test_a_pause_of_the_caller_stays():
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, **fields(60))
        await service.pausing(service.stub.Pause(c.PauseRequest()))
        assert (await update(service, 1, "ABORT")).paused_ns == 0  # the mode of the pause counts
        assert (await service.load()).paused
        await service.stub.Resume(c.ResumeRequest())
        await client.finished(0)
        assert check_spans(client.samples[0], 60) == ["", "v1"]


async def test_a_worker_that_restarts_gets_the_last_committed_weights():
    async with start(SHAPE) as service, session(service) as client:
        await update(service, 1)
        committed = (await update(service, 2)).weights
        await service.begin(client, **fields(60))
        service.worker.crash()
        service.release()
        await client.finished(0)
        assert service.worker.weights == committed  # with the time of the first commit
        assert check_spans(client.samples[0], 60) == ["v2"]


async def test_a_worker_whose_weights_cannot_be_read_again_gets_no_requests():
    async with start(SHAPE) as service, session(service) as client:
        await update(service, 1)
        service.worker.disk["/weights/1"] = 7
        await service.begin(client, **fields(60))
        service.worker.crash()
        service.release()
        load = await service.until_load(lambda load: "have changed" in load.not_ready_reason)
        assert not load.ready
        assert versions(service) == [""]
        service.worker.disk["/weights/1"] = 1
        await client.finished(0)
        assert versions(service) == ["v1"]


@pytest.mark.parametrize("dies", ["before", "after"])
async def test_a_replica_that_is_lost_during_a_commit_has_one_version_afterwards(dies):
    """The replica is lost before or after one rank has written the weights."""
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service, session(service) as client:
        await update(service, 1)
        await service.begin(client, **fields(60))
        last = service.workers[1]

        def lose() -> None:
            last.on_commit = lambda: None
            if dies == "after":
                asyncio.get_running_loop().call_soon(restart)
                return
            restart()
            raise RuntimeError("the process is gone")

        def restart() -> None:
            for worker in service.workers:
                worker.crash()
            replica.meet()

        last.on_commit = lose
        update_id = await stage(service, 2, version="v2")
        with contextlib.suppress(grpc.aio.AioRpcError):  # if the loss is seen before the answer
            await service.pausing(commit(service, update_id))
        await client.finished(0)
        assert len(set(versions(service))) == 1
        assert check_spans(client.samples[0], 60)[-1] == versions(service)[0]
        assert not (await service.load()).paused


async def test_an_update_with_the_version_of_the_present_weights_replaces_them_too():
    """A trainer may write each update into the same directory, which is the default version."""
    async with start(SHAPE) as service:
        for content in (1, 2):
            service.worker.disk["/weights/x"] = content
            await commit(service, await stage(service, "x"))
            sample = (await service.generate(**fields(4)))[0]
            assert sample.finish.usage.cached_prompt_tokens == 0
            assert sample.tokens == continuation(SHAPE, PROMPT, 4, seed=3, weights=content)


@pytest.mark.parametrize("mode", ["KEEP", "WAIT"])
async def test_a_pause_during_a_commit_begins_after_it_and_stays(mode):
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, **fields(60))
        writing, written = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            writing.set()
            await written.wait()

        service.worker.on_commit = write
        committing = asyncio.ensure_future(service.pausing(update(service, 1)))
        await writing.wait()
        steps = (await service.load()).counters.steps
        request = c.PauseRequest(mode=c.PauseMode.Value(f"PAUSE_MODE_{mode}"))
        pausing = asyncio.ensure_future(service.stub.Pause(request))
        for _ in range(20):
            assert (await service.load()).counters.steps == steps  # no step runs while weights are written
        assert not pausing.done()
        written.set()
        await check_paused_after(committing, pausing, service, client)


async def test_a_pause_that_replaces_that_of_a_commit_stays_after_the_commit():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **fields(60))
        await client.decided(0)
        update_id = await stage(service, 1, version="v1")
        committing = asyncio.ensure_future(commit(service, update_id, "WAIT"))
        await service.until_load(lambda load: load.paused)
        pausing = asyncio.ensure_future(service.stub.Pause(c.PauseRequest()))
        while await mode_of(service) is not PauseMode.KEEP:
            pass
        service.worker.release()
        await check_paused_after(committing, pausing, service, client)


async def test_an_update_whose_caller_leaves_while_it_is_staged_is_forgotten():
    async with start(SHAPE) as service:
        reading, read, discarded = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            reading.set()
            await read.wait()

        service.worker.on_stage = hold
        service.worker.on_discard = discarded.set
        call = service.stub.StageWeights(c.StageWeightsRequest(directory="/weights/1"))
        await reading.wait()
        call.cancel()
        for _ in range(10):
            await service.load()  # answered after the scheduler has seen the cancellation
        read.set()
        await discarded.wait()
        assert service.worker.staged is None
        service.worker.on_stage = lambda: None
        assert (await update(service, 2)).weights.version == "v2"


async def test_an_update_that_cannot_be_committed_is_forgotten():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **fields(10))
        await client.decided(0)
        committing = asyncio.ensure_future(update(service, 1, "WAIT"))
        await service.until_load(lambda load: load.paused)
        await service.stub.Resume(c.ResumeRequest())
        with pytest.raises(grpc.aio.AioRpcError, match=r"resumed before"):
            await committing
        assert service.worker.staged is None
        service.worker.release()
        await client.finished(0)


async def test_an_update_of_a_lost_worker_can_be_discarded():
    async with start(SHAPE) as service:
        update_id = await stage(service, 1)
        service.worker.crash()
        await service.generate(**fields(2))  # on the new connection
        await service.stub.DiscardWeights(c.DiscardWeightsRequest(update_id=update_id))
        with pytest.raises(grpc.aio.AioRpcError, match=r"not staged"):
            await commit(service, update_id)


async def test_a_worker_that_is_lost_while_it_reads_an_update_ends_the_call():
    async with start(SHAPE) as service:
        reading = asyncio.Event()

        async def hold() -> None:
            reading.set()
            await asyncio.Event().wait()

        service.worker.on_stage = hold
        staging = asyncio.ensure_future(stage(service, 1))
        await reading.wait()
        service.worker.crash()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await staging
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        service.worker.on_stage = lambda: None
        await service.until_load(lambda load: load.ready)
        await update(service, 2)


class Call:
    """A call of a worker that has ended."""

    def result(self) -> w.GetWeightsResponse:
        return w.GetWeightsResponse()

    def cancel(self) -> None:
        """Do nothing: it has ended."""


def test_calls_that_have_ended_are_not_kept():
    """The results of a call, such as checksums, would stay in memory with it."""
    calls = weakref.WeakSet()

    def call(request, timeout) -> Call:
        calls.add(made := Call())
        return made

    weights = WorkerWeights({"address": SimpleNamespace(GetWeights=SimpleNamespace(future=call))})
    weights.read(checksums=True)
    assert not calls
    weights.close()
    with pytest.raises(Unavailable, match="has ended"):
        weights.read(checksums=False)
