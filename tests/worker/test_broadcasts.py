"""Weights that a trainer broadcasts to a worker: they are staged like an upload, and no error changes anything."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator
from datetime import timedelta

import grpc
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from services.common.model.checkpoint_files import INDEX
from services.worker.engine.broadcast import Broadcasts
from services.worker.models.received import ReceivedTensors
from tests.trainer import Tensors, Trainer
from tests.worker.scheduler import Scheduler, status_of
from tests.worker.test_weights import DOWN, NORM, checksums, commit, stage
from tests.worker.uploading import header, prepare, tensors_of
from tokasaurus.common.v1 import weights_pb2 as common
from tokasaurus.worker.v1 import broadcast_pb2 as b

CODE = grpc.StatusCode
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
async def trainers() -> AsyncIterator[list[Trainer]]:
    """A list to which a test adds its trainers."""
    made: list[Trainer] = []
    yield made
    for trainer in made:
        trainer.close()


def group(trainer: Trainer, **more) -> common.UpdateGroup:
    fields = {"name": trainer.name, "first_rank": 1, "backend": "gloo"} | trainer.address
    return common.UpdateGroup(**fields | more)


async def join(scheduler: Scheduler, trainers: list[Trainer], name: str = "g") -> Trainer:
    """Make a trainer, and a group of it and the worker."""
    trainer = Trainer(2, name)
    trainers.append(trainer)
    await scheduler.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group(trainer)))
    await asyncio.wrap_future(trainer.joined)
    return trainer


def receive(scheduler: Scheduler, tensors: Tensors, update_id: str = "u", name: str = "g", **more):
    described = header(tensors).header.tensors
    request = b.ReceiveWeightsRequest(update_id=update_id, group=name, tensors=described, **more)
    return scheduler.stub.ReceiveWeights(request)


async def update(scheduler: Scheduler, trainer: Trainer, tensors: Tensors, update_id: str = "u") -> None:
    call = receive(scheduler, tensors, update_id, trainer.name)
    trainer.send(tensors.values())
    assert (await call).missing == 0


@pytest.mark.parametrize("flags", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
async def test_received_weights_are_those_of_a_fresh_worker(
    worker, connect, allowed, checkpoint, trainers, flags, flat
):
    new = checkpoint(seed=1)
    running = await connect(await worker(weight_directories=(str(allowed),), **flags))
    await running.info()
    before, tensors = await checksums(running), tensors_of(new)
    trainer = await join(running, trainers)
    await prepare(running)
    names = list(tensors)
    for part in (names[7:], names[:7]):  # in another order than in the file
        chosen = {name: tensors[name] for name in part}
        call = receive(running, chosen, flat=flat)
        content = [each.contiguous().reshape(-1).view(torch.uint8) for each in chosen.values()]
        trainer.send([torch.cat(content)] if flat else chosen.values())
        missing = await call
        assert missing.missing == (7 if part == names[7:] else 0)
    assert await checksums(running) == before
    staged = await stage(running, "", version="step 7")
    version = await commit(running)
    assert (version.version, version.uploaded, version.update_id) == ("step 7", True, "u")
    fresh = await connect(await worker(model=str(new), **flags))
    await fresh.info()
    assert await checksums(running) == await checksums(fresh)
    # A worker that restarts reads the files, and finds the same weights.
    assert list(allowed.glob(f"toka-uploads/*/u/{INDEX}"))
    assert (await stage(running, "", version="step 7")).fingerprint == staged.fingerprint


async def test_a_rank_without_the_files_stages_the_same(scheduler, checkpoint, trainers, allowed):
    """Another worker of the host has prepared the update, and writes its files."""
    (allowed / "toka-uploads" / "other" / "u").mkdir(parents=True)
    trainer = await join(scheduler, trainers)
    await update(scheduler, trainer, tensors_of(checkpoint(seed=1)))
    await stage(scheduler, "")
    await commit(scheduler)
    assert not list(allowed.glob("toka-uploads/*/u/*"))


WRONG = {
    "extra": (lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(2)}), "model.layers.9.x"),
    "shape": (lambda tensors: tensors.update({NORM: torch.zeros(7)}), NORM),
    "dtype": (lambda tensors: tensors.update({NORM: tensors[NORM].int()}), NORM),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_tensors_that_do_not_fit_are_refused_before_any_arrives(scheduler, checkpoint, trainers, wrong):
    before, tensors = await checksums(scheduler), tensors_of(checkpoint(seed=1))
    edit, name = WRONG[wrong]
    edit(tensors)
    trainer = await join(scheduler, trainers)
    code, details = await status_of(receive(scheduler, tensors))
    assert (code, name in details) == (CODE.INVALID_ARGUMENT, True), details
    with pytest.raises(RuntimeError):  # the group is closed, so a trainer that sends them gets an error
        await asyncio.wrap_future(trainer.send([torch.zeros(2**20)] * 8))
    assert (await status_of(receive(scheduler, {})))[0] is CODE.FAILED_PRECONDITION
    assert await checksums(scheduler) == before


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
async def test_a_tensor_that_is_larger_than_the_memory_is_refused(scheduler, trainers, flat):
    """No rank needs it, so its size is not among those of the weights."""
    await join(scheduler, trainers)
    described = common.UploadedTensor(name="model.layers.0.self_attn.rotary_emb.inv_freq", dtype="F32", shape=[2**50])
    request = b.ReceiveWeightsRequest(update_id="u", group="g", tensors=[described], flat=flat)
    code, details = await status_of(scheduler.stub.ReceiveWeights(request))
    assert (code, "too little memory" in details) == (CODE.FAILED_PRECONDITION, True), details


async def test_a_value_that_is_not_finite_or_was_not_sent_is_named(scheduler, checkpoint, trainers):
    before, tensors = await checksums(scheduler), tensors_of(checkpoint(seed=1))
    for wrong in (torch.full_like(tensors[NORM], float("nan")), tensors[NORM][:-1]):
        trainer = await join(scheduler, trainers)
        call = receive(scheduler, tensors)
        sent = trainer.send((tensors | {NORM: wrong}).values())
        code, details = await status_of(call)
        assert (code, NORM in details) == (CODE.INVALID_ARGUMENT, True), details
        await asyncio.wait([asyncio.wrap_future(sent)])
    assert (await status_of(stage(scheduler, "")))[0] is CODE.INVALID_ARGUMENT
    assert await checksums(scheduler) == before


async def test_a_tensor_that_is_sent_twice_or_missing_is_named(scheduler, checkpoint, trainers):
    before, tensors = await checksums(scheduler), tensors_of(checkpoint(seed=1))
    trainer = await join(scheduler, trainers)
    await prepare(scheduler)
    part = {name: each for name, each in tensors.items() if name != DOWN}
    call = receive(scheduler, part)
    trainer.send(part.values())
    assert (await call).first_missing == DOWN
    code, details = await status_of(stage(scheduler, ""))
    assert (code, DOWN in details) == (CODE.INVALID_ARGUMENT, True), details
    call = receive(scheduler, {NORM: tensors[NORM]}, "v")
    trainer.send([tensors[NORM]])
    await call
    code, details = await status_of(receive(scheduler, {NORM: tensors[NORM]}, "v"))
    assert (code, f"{NORM} has arrived before" in details) == (CODE.INVALID_ARGUMENT, True), details
    assert await checksums(scheduler) == before


@pytest.mark.parametrize("same", [True, False])
async def test_a_head_that_is_tied_must_be_the_embedding(worker, connect, allowed, checkpoint, trainers, same):
    scheduler = await connect(await worker(model=str(checkpoint(tied=True)), weight_directories=(str(allowed),)))
    await scheduler.info()
    trainer, tensors = await join(scheduler, trainers), tensors_of(checkpoint(tied=True, seed=1))
    tensors = {_HEAD: tensors[_EMBEDDING] + (0 if same else 1), **tensors}
    await prepare(scheduler)
    await update(scheduler, trainer, tensors)
    if same:
        await stage(scheduler, "")
    else:
        code, details = await status_of(stage(scheduler, ""))
        assert (code, _HEAD in details) == (CODE.INVALID_ARGUMENT, True), details


def _exit_early(tensors: list[torch.Tensor], port: int) -> None:
    """Be a trainer that exits before its last tensor."""
    trainer = Trainer(2, "g", port=port)
    trainer.joined.result()
    trainer.send(tensors[:-1]).result()
    os._exit(1)


async def test_a_trainer_that_exits_changes_nothing_and_another_one_can_follow(scheduler, checkpoint, trainers):
    before, tensors = await checksums(scheduler), tensors_of(checkpoint(seed=1))
    trainer = Trainer(2, "g", joins=False)
    process = multiprocessing.get_context("spawn").Process(target=_exit_early, args=([*tensors.values()], trainer.port))
    process.start()
    await scheduler.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group(trainer)))
    code, details = await status_of(receive(scheduler, tensors))
    assert (code, "join a new group" in details) == (CODE.UNAVAILABLE, True), details
    process.join()
    assert await checksums(scheduler) == before
    await prepare(scheduler)
    await update(scheduler, await join(scheduler, trainers), tensors)
    await stage(scheduler, "")
    await commit(scheduler)
    assert await checksums(scheduler) != before


async def test_two_groups_do_not_mix_their_updates(scheduler, checkpoint, trainers):
    tensors = tensors_of(checkpoint(seed=1))
    first, second = await join(scheduler, trainers, "a"), await join(scheduler, trainers, "b")
    await prepare(scheduler)
    call = receive(scheduler, {NORM: tensors[NORM]}, "u", "a")
    first.send([tensors[NORM]])
    assert (await call).missing == len(tensors) - 1
    await prepare(scheduler, "v")
    await update(scheduler, second, tensors, "v")  # replaces the update of the first
    assert (await status_of(stage(scheduler, "", "u")))[0] is CODE.INVALID_ARGUMENT
    await stage(scheduler, "", "v")
    assert (await scheduler.stub.LeaveUpdateGroup(b.LeaveUpdateGroupRequest(name="a"))).left
    assert not (await scheduler.stub.LeaveUpdateGroup(b.LeaveUpdateGroupRequest(name="a"))).left
    assert (await status_of(receive(scheduler, {}, name="a")))[0] is CODE.FAILED_PRECONDITION
    await commit(scheduler, "v")


async def test_a_caller_that_leaves_closes_the_group(scheduler, checkpoint, trainers, monkeypatch):
    trainer, tensors = await join(scheduler, trainers), tensors_of(checkpoint(seed=1))
    abandon, closed, began = Broadcasts.abandon, threading.Event(), threading.Event()

    def note(broadcasts, of) -> None:
        abandon(broadcasts, of)
        closed.set()

    add = ReceivedTensors.add
    monkeypatch.setattr(Broadcasts, "abandon", note)
    monkeypatch.setattr(ReceivedTensors, "add", lambda *given: began.set() or add(*given))
    call = receive(scheduler, tensors)
    trainer.send([next(iter(tensors.values()))])
    await asyncio.to_thread(began.wait)
    call.cancel()
    await asyncio.to_thread(closed.wait)
    assert not (await scheduler.stub.LeaveUpdateGroup(b.LeaveUpdateGroupRequest(name="g"))).left
    assert (await status_of(receive(scheduler, tensors)))[0] is CODE.FAILED_PRECONDITION


async def test_calls_at_the_same_time_are_refused(scheduler, checkpoint, trainers, monkeypatch):
    trainer, tensors = await join(scheduler, trainers), tensors_of(checkpoint(seed=1))
    began, add = threading.Event(), ReceivedTensors.add
    monkeypatch.setattr(ReceivedTensors, "add", lambda *given: began.set() or add(*given))
    call = receive(scheduler, tensors)
    trainer.send([next(iter(tensors.values()))])
    await asyncio.to_thread(began.wait)
    code, details = await status_of(receive(scheduler, tensors))
    assert (code, "another call receives" in details) == (CODE.FAILED_PRECONDITION, True), details
    trainer.send(list(tensors.values())[1:])
    assert (await status_of(call))[0] is CODE.UNAVAILABLE  # the other call has closed the group


BAD_GROUPS = [
    ({"name": ""}, "group.name"),
    ({"name": "x" * 129}, "group.name"),
    ({"backend": "mpi"}, "group.backend"),
    ({"backend": "nccl"}, "group.backend"),
    ({"master_address": ""}, "group.master_address"),
    ({"master_address": "x" * 64}, "group.master_address"),
    ({"master_address": "a..b"}, "group.master_address"),
    ({"master_address": "a\0b"}, "group.master_address"),
    ({"master_port": 0}, "group.master_port"),
    ({"first_rank": 0}, "group.world_size"),
    ({"world_size": 1}, "group.world_size"),
    ({"world_size": 2**31}, "group.world_size"),
    ({"timeout_ns": 0}, "group.timeout_ns"),
    ({"timeout_ns": 2**64 - 1}, "group.timeout_ns"),
]


@pytest.mark.parametrize(("wrong", "field"), BAD_GROUPS)
async def test_a_wrong_group_is_refused(scheduler, wrong, field):
    trainer = Trainer(2, "g", joins=False)
    call = scheduler.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group(trainer, **wrong)))
    assert (await status_of(call))[0] is CODE.INVALID_ARGUMENT
    assert field.encode() in dict(await call.trailing_metadata())["grpc-status-details-bin"]


async def test_a_group_that_does_not_form_in_time_is_unavailable(scheduler, trainers):
    trainer = Trainer(2, "g", joins=False)
    timeout = {"timeout_ns": 10**8}
    call = scheduler.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group(trainer, **timeout)))
    code, details = await status_of(call)  # nothing listens
    assert (code, "did not form" in details) == (CODE.UNAVAILABLE, True), details
    trainer = Trainer(3, "g", timeout=timedelta(seconds=5))
    trainers.append(trainer)
    call = scheduler.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group(trainer, timeout_ns=2 * 10**9)))
    code, details = await status_of(call)  # a rank is missing
    assert (code, "did not form" in details) == (CODE.UNAVAILABLE, True), details


async def test_without_the_flag_no_group_is_joined(connect):
    scheduler = await connect()
    await scheduler.info()
    call = scheduler.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group(Trainer(2, "g", joins=False))))
    code, details = await status_of(call)
    assert (code, "weight_directories=" in details) == (CODE.PERMISSION_DENIED, True)


def _sglang_trainer(port: int, tensors: list[torch.Tensor], received) -> None:
    """Be a trainer that makes its group as SGLang's ``init_custom_process_group`` does, and keeps its default group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001
        size, rank, [], c10d.Backend("gloo"), dist.PrefixStore("g", store), group_name="g", timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}  # noqa: SLF001
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=group)
    received.wait()
    os._exit(0)


@pytest.mark.slow
async def test_a_group_that_sglang_makes_fits(scheduler, checkpoint):
    tensors = tensors_of(checkpoint(seed=1))
    trainer = Trainer(2, "g", joins=False)
    context = multiprocessing.get_context("spawn")
    received = context.Event()
    process = context.Process(target=_sglang_trainer, args=(trainer.port, [*tensors.values()], received))
    process.start()
    await scheduler.stub.JoinUpdateGroup(b.JoinUpdateGroupRequest(group=group(trainer)))
    await prepare(scheduler)
    assert (await receive(scheduler, tensors)).missing == 0
    received.set()
    process.join()
    assert process.exitcode == 0
    await stage(scheduler, "")
    await commit(scheduler)
