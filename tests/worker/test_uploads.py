"""Uploads to a worker: they are staged like a directory, and no error leaves a file."""

import shutil
import threading
from collections import namedtuple
from concurrent.futures import Future

import grpc
import pytest
import torch

from services.common.config import WorkerConfig
from services.worker.boot.common import boot
from services.worker.engine.uploads import Uploads
from services.worker.engine.weights import ModelWeights
from tests.worker.scheduler import status_of
from tests.worker.test_weights import DOWN, FLAGS, NORM, checksums, commit, stage
from tests.worker.uploading import chunk, chunks, content, files, header, prepare, send, tensors_of, upload
from tokasaurus.common.v1 import weights_pb2 as common
from tokasaurus.worker.v1 import weights_pb2 as w


def discard(scheduler, update_id: str, *, remove_upload: bool = True):
    request = w.DiscardWeightsRequest(update_id=update_id, remove_upload=remove_upload)
    return scheduler.stub.DiscardWeights(request)


@pytest.mark.parametrize("flags", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
async def test_uploaded_weights_are_those_of_a_fresh_worker(worker, connect, allowed, checkpoint, flags):
    new = checkpoint(seed=1)
    running = await connect(await worker(weight_directories=(str(allowed),), **flags))
    await running.info()
    before = await checksums(running)
    await upload(running, new)
    await stage(running, "", version="step 7")
    assert await checksums(running) == before
    version = await commit(running)
    assert (version.version, version.uploaded, version.update_id) == ("step 7", True, "u")
    assert version.directory.startswith(f"{allowed}/toka-uploads/")
    fresh = await connect(await worker(model=str(new), **flags))
    await fresh.info()
    assert await checksums(running) == await checksums(fresh)


async def test_the_files_are_readable_by_this_user_only(scheduler, checkpoint, allowed):
    await upload(scheduler, checkpoint(seed=1))
    [file] = allowed.glob("toka-uploads/*/u/model.safetensors")
    assert file.stat().st_mode & 0o077 == 0


async def test_a_copy_of_the_embedding_for_a_tied_head_is_accepted(worker, connect, allowed, checkpoint):
    tied = checkpoint(tied=True)
    scheduler = await connect(await worker(model=str(tied), weight_directories=(str(allowed),)))
    await scheduler.info()
    tensors = tensors_of(checkpoint(tied=True, seed=1))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    await send(scheduler, [header(tensors), *chunks(tensors)])
    await stage(scheduler, "")


WRONG_HEADERS = {
    "missing": (lambda tensors: tensors.pop(DOWN), DOWN),
    "extra": (lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(2)}), "model.layers.9.x"),
    "shape": (lambda tensors: tensors.update({NORM: torch.zeros(7)}), NORM),
    "dtype": (lambda tensors: tensors.update({NORM: tensors[NORM].int()}), NORM),
    "path": (lambda tensors: tensors.update({"../../x": torch.zeros(2)}), "../../x"),
    "unused": (lambda tensors: tensors.update({"x.rotary_emb.inv_freq": torch.zeros(2**22)}), "x.rotary_emb.inv_freq"),
}


@pytest.mark.parametrize("wrong", WRONG_HEADERS)
async def test_a_header_that_does_not_fit_is_refused_before_any_byte(scheduler, checkpoint, allowed, wrong):
    edit, name = WRONG_HEADERS[wrong]
    tensors = tensors_of(checkpoint(seed=1))
    edit(tensors)
    await prepare(scheduler)
    call = scheduler.stub.UploadWeights()
    await call.write(header(tensors))
    await call.done_writing()
    code, details = await status_of(call)
    assert (code, name in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
    assert files(allowed) == []


def float32(name: str, **fields) -> common.UploadedTensor:
    return common.UploadedTensor(name=name, dtype="F32", **fields)


MANY = float32("x.rotary_emb.inv_freq", shape=[1] * 9)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "must be a header"),
        ([chunk(NORM, 0, b"x")], "must be a header"),
        ([w.UploadWeightsRequest(header=w.UploadHeader(update_id="u", tensors=[float32("a"), float32("a")]))], "twice"),
        ([w.UploadWeightsRequest(header=w.UploadHeader(update_id="u", tensors=[MANY]))], "9 dimensions"),
    ],
)
async def test_a_stream_without_a_valid_header_is_refused(scheduler, messages, text):
    code, details = await status_of(scheduler.stub.UploadWeights(iter(messages)))
    assert (code, text in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details


WRONG_CHUNKS = {
    "unknown": ([chunk("model.layers.9.x", 0, b"x")], "model.layers.9.x"),
    "too long": ([chunk(NORM, 0, b"x" * 10**6)], NORM),
    "behind": ([chunk(NORM, 2**40, b"x")], NORM),
    "twice": ([chunk(NORM, 0, b"xxxx"), chunk(NORM, 3, b"x")], NORM),
    "empty": ([chunk(NORM, 0, b"")], NORM),
    "second header": ([w.UploadWeightsRequest(header=w.UploadHeader())], "expected a chunk"),
    "neither": ([w.UploadWeightsRequest()], "expected a chunk"),
    "all missing": ([], "without byte 0 of"),
}


@pytest.mark.parametrize("wrong", WRONG_CHUNKS)
async def test_wrong_chunks_name_the_tensor_and_leave_no_file(scheduler, checkpoint, allowed, wrong):
    messages, text = WRONG_CHUNKS[wrong]
    before = await checksums(scheduler)
    code, details = await status_of(send(scheduler, [header(tensors_of(checkpoint(seed=1))), *messages]))
    assert (code, text in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
    assert files(allowed) == []
    assert (await status_of(stage(scheduler, "")))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert await checksums(scheduler) == before


async def test_a_gap_is_named(scheduler, checkpoint, allowed):
    tensors = tensors_of(checkpoint(seed=1))
    sent = [each for each in chunks(tensors, 64) if (each.chunk.name, each.chunk.offset) != (DOWN, 128)]
    code, details = await status_of(send(scheduler, [header(tensors), *reversed(sent)]))
    assert (code, f"{DOWN}: " in details, "byte 128 of" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True, True)
    assert files(allowed) == []


async def test_staging_names_a_tensor_with_values_that_are_not_finite(scheduler, checkpoint):
    tensors = tensors_of(checkpoint(seed=1))
    tensors[DOWN][0, 0] = float("nan")
    await send(scheduler, [header(tensors), *chunks(tensors)])
    code, details = await status_of(stage(scheduler, ""))
    assert (code, DOWN in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_stream_that_breaks_off_leaves_no_file(scheduler, checkpoint, allowed):
    tensors = tensors_of(checkpoint(seed=1))
    await prepare(scheduler)
    call = scheduler.stub.UploadWeights()
    await call.write(header(tensors))
    await call.write(chunk(NORM, 0, content(tensors[NORM])))
    while not list(allowed.glob("toka-uploads/*/u/*")):
        await scheduler.info()
    call.cancel()
    while files(allowed):
        await scheduler.info()


async def test_without_space_on_the_disk_nothing_is_written(scheduler, checkpoint, allowed, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    code, details = await status_of(upload(scheduler, checkpoint(seed=1)))
    assert (code, "too little space" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert files(allowed) == []


async def test_a_directory_that_cannot_be_written_is_named(scheduler, allowed):
    (allowed / "toka-uploads").write_bytes(b"")  # no directory
    code, details = await status_of(prepare(scheduler))
    assert (code, f"{allowed}/toka-uploads" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_without_the_flag_no_upload_is_received(connect):
    scheduler = await connect()
    await scheduler.info()
    code, details = await status_of(prepare(scheduler))
    assert (code, "weight_directories=" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)


@pytest.mark.parametrize("update_id", ["", "..", "../u", "a/b", "x" * 65, "a\0"])
async def test_an_id_that_is_no_file_name_is_refused(scheduler, checkpoint, update_id):
    assert (await status_of(prepare(scheduler, update_id)))[0] is grpc.StatusCode.INVALID_ARGUMENT
    await discard(scheduler, update_id)  # has no effect
    tensors = tensors_of(checkpoint())
    refused = await status_of(scheduler.stub.UploadWeights(iter([header(tensors, update_id), *chunks(tensors)])))
    assert refused[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_workers_of_one_file_system_share_an_upload(worker, connect, allowed, checkpoint):
    first, second = [await connect(await worker(weight_directories=(str(allowed),))) for _ in range(2)]
    for each in (first, second):
        await each.info()
    await upload(first, checkpoint(seed=1))
    assert not await prepare(second)
    for each in (first, second):
        await stage(each, "")
        await commit(each)
    assert await checksums(first) == await checksums(second)
    await discard(second, "u")  # it is not its own
    assert files(allowed) == ["u"]


async def test_a_discarded_upload_is_removed_unless_it_is_committed(scheduler, checkpoint, allowed):
    for update_id in ("a", "b"):
        await upload(scheduler, checkpoint(seed=1), update_id)
    await discard(scheduler, "a", remove_upload=False)
    assert files(allowed) == ["a", "b"]
    await discard(scheduler, "a")
    assert files(allowed) == ["b"]
    await stage(scheduler, "", "b")
    await commit(scheduler, "b")
    await discard(scheduler, "b")
    assert files(allowed) == ["b"]


async def test_a_new_stream_of_plans_removes_all_other_uploads(scheduler, checkpoint, allowed):
    for update_id in ("a", "b", "c"):
        await upload(scheduler, checkpoint(seed=1), update_id)
    other = Uploads(allowed, "another worker")
    assert other.prepare("d")
    await stage(scheduler, "", "b")
    await commit(scheduler, "b")
    await scheduler.connect()
    assert files(allowed) == ["b", "d"]
    scheduler.call.cancel()


async def test_a_worker_that_restarts_finds_its_uploads(worker, connect, checkpoint, allowed):
    """It has the same address. The upload that the scheduler asks for again is kept."""
    uploads = Uploads(allowed, "unix:/run/w.sock")
    assert uploads.prepare("a")
    assert uploads.prepare("b")
    restarted = Uploads(allowed, "unix:/run/w.sock")
    assert restarted.find("a") == uploads.find("a")
    restarted.keep_only("a")
    assert files(allowed) == ["a"]
    restarted.keep_only("")
    assert list(allowed.glob("toka-uploads/*")) == []


def test_a_scheduler_that_connects_during_a_commit_gets_its_version_and_finds_its_files(checkpoint, allowed):
    """The scheduler that began the commit was lost."""
    new = checkpoint(seed=1)
    booted = boot(WorkerConfig(model=str(checkpoint()), **FLAGS))
    seen: list[str] = []

    def connect() -> None:
        seen.append(weights.settled_version().update_id)
        weights.remove_abandoned_uploads()

    connecting = threading.Thread(target=connect)

    def run_alone(call, is_wanted) -> Future[None]:
        connecting.start()
        connecting.join(0.2)  # until it waits for the commit
        call()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    weights = ModelWeights(booted.loaded, booted.runner, run_alone, [str(allowed)], "address")
    assert weights.uploads.prepare("u")
    [directory] = allowed.glob("toka-uploads/*/u")
    for path in new.glob("*"):
        shutil.copy(path, directory)
    weights.stage("u", "1", "")
    weights.commit("u")
    connecting.join()
    assert (seen, files(allowed)) == (["u"], ["u"])
    booted.runner.close()
