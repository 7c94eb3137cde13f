"""Weights that a trainer shares by CUDA IPC, with a fake GPU: they are staged like an upload, or change nothing."""

import asyncio
import threading

import grpc
import pytest
import torch

from services.common.model.checkpoint_files import INDEX
from services.worker.engine.shared_weights import SharedWeights
from tests.fakes.gpu import UUID, FakeGpu
from tests.trainer import Tensors
from tests.worker.scheduler import Scheduler, status_of
from tests.worker.test_weights import DOWN, NORM, checksums, commit, stage
from tests.worker.uploading import header, prepare, tensors_of
from tokasaurus.common.v1 import shared_weights_pb2 as common
from tokasaurus.worker.v1 import shared_weights_pb2 as s

CODE = grpc.StatusCode
UNUSED = "model.layers.0.self_attn.rotary_emb.inv_freq"  # no rank needs it, so its shape is not compared


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr("services.worker.engine.shared_weights.gpu_of", lambda device: gpu)
    return gpu


def shared(gpu: FakeGpu, tensors: Tensors, update_id: str = "u", uuid: str = UUID) -> s.CopySharedWeightsRequest:
    """Share ``tensors`` in one allocation, and return the request to copy them."""
    handle, offsets = gpu.share(*tensors.values())
    request = s.CopySharedWeightsRequest(update_id=update_id)
    request.allocations.add(handle=handle, gpu_uuid=uuid)
    for tensor, offset in zip(header(dict(tensors)).header.tensors, offsets, strict=True):
        request.tensors.add(tensor=tensor, copies=[common.SharedCopy(allocation=0, offset=offset)])
    return request


def copy(scheduler: Scheduler, request: s.CopySharedWeightsRequest):
    return scheduler.stub.CopySharedWeights(request)


@pytest.mark.parametrize("flags", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
async def test_copied_weights_are_those_of_a_fresh_worker(worker, connect, allowed, checkpoint, gpu, flags):
    new = checkpoint(seed=1)
    running = await connect(await worker(weight_directories=(str(allowed),), **flags))
    await running.info()
    before, tensors = await checksums(running), tensors_of(new)
    await prepare(running)
    names = list(tensors)
    for part in (names[7:], names[:7]):  # in another order than in the file
        missing = await copy(running, shared(gpu, {name: tensors[name] for name in part}))
        assert (missing.missing, missing.first_missing) == ((0, "") if part == names[:7] else (7, min(names[:7])))
        assert gpu.open == {}
        for memory in gpu.shared.values():  # the trainer changes its tensors
            memory.zero_()
    assert gpu.opened == list(gpu.shared)  # each once
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


@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID.upper()}", "another"])
async def test_a_worker_reads_the_copy_on_its_own_gpu_or_the_first_one(scheduler, checkpoint, gpu, uuid):
    tensors = tensors_of(checkpoint(seed=1))
    request = shared(gpu, tensors, uuid="a third one")
    own = shared(gpu, tensors, uuid=uuid)
    request.allocations.extend(own.allocations)
    for each, of in zip(request.tensors, own.tensors, strict=True):
        each.copies.add(allocation=1, offset=of.copies[0].offset)
    assert (await copy(scheduler, request)).missing == 0
    assert gpu.opened == [request.allocations[uuid != "another"].handle]


WRONG = {
    "extra": ({"model.layers.9.x": torch.zeros(2)}, "model.layers.9.x"),
    "shape": ({NORM: torch.zeros(7)}, NORM),
    "dtype": ({NORM: torch.zeros(64, dtype=torch.int32)}, NORM),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_tensors_that_do_not_fit_are_refused_before_memory_is_opened(scheduler, checkpoint, gpu, wrong):
    before = await checksums(scheduler)
    tensors, name = WRONG[wrong]
    code, details = await status_of(copy(scheduler, shared(gpu, tensors_of(checkpoint(seed=1)) | tensors)))
    assert (code, name in details) == (CODE.INVALID_ARGUMENT, True), details
    assert gpu.opened == []
    assert await checksums(scheduler) == before


def _unknown_handle(gpu, request, tensor) -> None:
    request.allocations.add(handle=bytes(range(64)), gpu_uuid=UUID)
    tensor.copies[0].allocation = 1


def _end_beyond(gpu, request, tensor) -> None:
    tensor.copies[0].offset = gpu.shared[request.allocations[0].handle].nbytes - 1


def _start_beyond(gpu, request, tensor) -> None:
    tensor.copies[0].offset = 2**64 - 1


def _huge(gpu, request, tensor) -> None:
    tensor.tensor.name, tensor.tensor.shape[:] = UNUSED, [2**50]


def _without_size(gpu, request, tensor) -> None:
    gpu.fails = "cuMemGetAddressRange_v2"


def _unreadable(gpu, request, tensor) -> None:
    gpu.fails = "copy"


HOSTILE = {
    "a handle of no allocation": (_unknown_handle, CODE.INVALID_ARGUMENT, "CUDA_ERROR_INVALID_VALUE"),
    "an end beyond the allocation": (_end_beyond, CODE.INVALID_ARGUMENT, "of an allocation of"),
    "a start beyond the allocation": (_start_beyond, CODE.INVALID_ARGUMENT, "of an allocation of"),
    "a tensor larger than the allocation": (_huge, CODE.INVALID_ARGUMENT, "of an allocation of"),
    "an allocation of unknown size": (_without_size, CODE.INVALID_ARGUMENT, "cuMemGetAddressRange_v2"),
    "memory that cannot be read": (_unreadable, CODE.FAILED_PRECONDITION, "cuMemcpyDtoHAsync_v2"),
}


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_memory_that_cannot_be_used_changes_nothing(scheduler, checkpoint, gpu, hostile):
    edit, expected, text = HOSTILE[hostile]
    before, tensors = await checksums(scheduler), tensors_of(checkpoint(seed=1))
    request = shared(gpu, tensors)
    edit(gpu, request, request.tensors[0])
    code, details = await status_of(copy(scheduler, request))
    assert (code, request.tensors[0].tensor.name in details, text in details) == (expected, True, True), details
    assert gpu.open == {}
    assert await checksums(scheduler) == before
    gpu.fails = None
    await prepare(scheduler, "v")
    await copy(scheduler, shared(gpu, tensors, "v"))
    await stage(scheduler, "", "v")
    await commit(scheduler, "v")
    assert await checksums(scheduler) != before


def _short_handle(request) -> None:
    request.allocations[0].handle = bytes(63)


def _no_copy(request) -> None:
    del request.tensors[0].copies[:]


def _no_allocation(request) -> None:
    request.tensors[0].copies[0].allocation = 1


def _twice(request) -> None:
    request.tensors.append(request.tensors[0])


def _wide(request) -> None:
    request.tensors[0].tensor.name, request.tensors[0].tensor.shape[:] = UNUSED, [0, 2**64 - 1]


MALFORMED = {
    "63 bytes": _short_handle,
    "has no copies": _no_copy,
    "the request has 1": _no_allocation,
    "twice": _twice,
    "dimension": _wide,
}


@pytest.mark.parametrize("text", MALFORMED)
async def test_a_malformed_request_is_refused(scheduler, checkpoint, gpu, text):
    request = shared(gpu, tensors_of(checkpoint(seed=1)))
    MALFORMED[text](request)
    code, details = await status_of(copy(scheduler, request))
    assert (code, text in details) == (CODE.INVALID_ARGUMENT, True), details
    assert gpu.opened == []


async def test_a_value_that_is_not_finite_or_a_tensor_that_is_sent_twice_or_missing_is_named(
    scheduler, checkpoint, gpu
):
    before, tensors = await checksums(scheduler), tensors_of(checkpoint(seed=1))
    wrong = torch.full_like(tensors[NORM], float("nan"))
    code, details = await status_of(copy(scheduler, shared(gpu, tensors | {NORM: wrong})))
    assert (code, NORM in details) == (CODE.INVALID_ARGUMENT, True), details
    await prepare(scheduler, "v")
    part = {name: each for name, each in tensors.items() if name != DOWN}
    assert (await copy(scheduler, shared(gpu, part, "v"))).first_missing == DOWN
    code, details = await status_of(copy(scheduler, shared(gpu, {NORM: tensors[NORM]}, "v")))
    assert (code, f"{NORM} has arrived before" in details) == (CODE.INVALID_ARGUMENT, True), details
    code, details = await status_of(stage(scheduler, "", "v"))
    assert (code, DOWN in details) == (CODE.INVALID_ARGUMENT, True), details
    assert gpu.open == {}
    assert await checksums(scheduler) == before


async def test_a_caller_that_leaves_ends_the_copies(scheduler, checkpoint, gpu, monkeypatch):
    tensors = tensors_of(checkpoint(seed=1))
    began, left, copied = threading.Event(), threading.Event(), []

    def copy_tensors(weights, update_id, tensors, is_active, original=SharedWeights.copy):
        is_active.__self__.add_callback(left.set)
        return original(weights, update_id, tensors, is_active)

    def wait() -> None:
        copied.append(None)
        began.set()
        left.wait()

    monkeypatch.setattr(SharedWeights, "copy", copy_tensors)
    gpu.on_copy = wait
    call = copy(scheduler, shared(gpu, tensors))
    await asyncio.to_thread(began.wait)
    call.cancel()
    assert (await copy(scheduler, shared(gpu, {}, "v"))).missing == len(tensors)  # after the end of the first call
    assert (copied, gpu.open) == ([None], {})


async def test_a_worker_on_a_cpu_names_the_other_ways(scheduler, checkpoint):
    request = shared(FakeGpu(), tensors_of(checkpoint(seed=1)))
    code, details = await status_of(copy(scheduler, request))
    assert (code, "on a CPU" in details, "gloo" in details) == (CODE.FAILED_PRECONDITION, True, True), details


async def test_without_the_flag_nothing_is_copied(connect, gpu):
    scheduler = await connect()
    await scheduler.info()
    code, details = await status_of(copy(scheduler, s.CopySharedWeightsRequest(update_id="u")))
    assert (code, "weight_directories=" in details) == (CODE.PERMISSION_DENIED, True)
