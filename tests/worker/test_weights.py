"""New weights for a worker that runs: what it computes then, and updates that must change nothing."""

import asyncio
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import grpc
import pytest
import safetensors.torch
import torch

from services.common.config import WorkerConfig
from services.worker.boot.common import Booted, boot
from services.worker.engine.weights import ModelWeights
from tests.checkpoints import ARCHITECTURES
from tests.worker.driver import Driver
from tests.worker.scheduler import GREEDY, admission, status_of
from tokasaurus.worker.v1 import weights_pb2 as w

FLAGS = {"device": "cpu", "page_size": 16, "kv_cache_num_tokens": 16 * 64, "torch_num_threads": 1}
PROMPT = [2 + index * 7 % 300 for index in range(40)]


def weights_of(booted: Booted, *directories: Path) -> ModelWeights:
    """The weights of a rank without a compute thread."""

    def run_alone(call, is_wanted):
        call()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return ModelWeights(booted.loaded, booted.runner, run_alone, [str(each) for each in directories], "address")


def generated(booted: Booted) -> tuple:
    driver = Driver(booted.runner)
    driver.reset()
    tokens = driver.generate([PROMPT, PROMPT[3:]], 12, logprobs=True)
    return tokens, driver.logprobs


CASES = [
    *((architecture, False, {}) for architecture in ARCHITECTURES),
    ("llama", True, {}),
    ("llama", False, {"dtype": "bfloat16"}),
    *(("llama", True, {"quantization": each}) for each in ("fp8", "int8", "int4")),
    ("qwen3_moe", False, {"quantization": "fp8"}),
    ("llama", False, {"torch_compile": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "tied", "flags"), CASES)
def test_updated_weights_are_those_of_a_fresh_worker(checkpoint, architecture, tied, flags):
    old, new = checkpoint(architecture, tied=tied), checkpoint(architecture, tied=tied, seed=1, sharded=True)
    running, fresh = (boot(WorkerConfig(model=str(each), **FLAGS, **flags)) for each in (old, new))
    weights = weights_of(running, new.parent)
    addresses = [tensor.data_ptr() for tensor in running.loaded.model.state_dict().values()]
    before, expected = generated(running), generated(fresh)
    assert before != expected
    weights.stage("u", "1", str(new))
    assert generated(running) == before
    weights.commit("u")
    assert generated(running) == expected
    assert weights.checksums()[1] == weights_of(fresh).checksums()[1]
    assert [tensor.data_ptr() for tensor in running.loaded.model.state_dict().values()] == addresses
    running.runner.close()
    fresh.runner.close()


def test_a_model_that_runs_through_transformers_keeps_its_weights(checkpoint):
    directory = checkpoint()
    booted = boot(WorkerConfig(model=str(directory), model_impl="transformers", **FLAGS))
    with pytest.raises(Exception, match="transformers cannot be replaced"):
        weights_of(booted, directory).stage("u", "1", str(directory))


def edited(source: Path, target: Path, edit) -> Path:
    """A copy of the checkpoint ``source`` at ``target``, with ``edit`` applied to its tensors."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    edit(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return target


NORM, DOWN = "model.norm.weight", "model.layers.2.mlp.down_proj.weight"
WRONG = {
    "missing": (lambda tensors: tensors.pop(DOWN), DOWN),
    "extra": (lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(2)}), "model.layers.9.x"),
    "shape": (lambda tensors: tensors.update({NORM: torch.zeros(7)}), NORM),
    "transposed": (lambda tensors: tensors.update({DOWN: tensors[DOWN].t().contiguous()}), DOWN),
    "dtype": (lambda tensors: tensors.update({NORM: tensors[NORM].int()}), NORM),
    "nan": (lambda tensors: tensors[DOWN].view(-1)[5:6].fill_(float("nan")), DOWN),
    "infinite": (lambda tensors: tensors[NORM][3:4].fill_(float("inf")), NORM),
}


@pytest.fixture
async def stub(worker, connect, checkpoint, tmp_path):
    """``stub``, and the directory from which weights may be read."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    scheduler = await connect(await worker(weight_directories=(str(allowed),)))
    info = await scheduler.info()
    assert (info.weights.version, info.weights.directory) == ("", str(checkpoint()))
    return scheduler, allowed


async def stage(scheduler, directory, update_id="u", version="1") -> w.StageWeightsResponse:
    request = w.StageWeightsRequest(update_id=update_id, version=version, directory=str(directory))
    return await scheduler.stub.StageWeights(request)


async def commit(scheduler, update_id="u"):
    return (await scheduler.stub.CommitWeights(w.CommitWeightsRequest(update_id=update_id))).weights


async def checksums(scheduler) -> list:
    return list((await scheduler.stub.GetWeights(w.GetWeightsRequest(checksums=True))).checksums)


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_update_that_does_not_fit_names_the_tensor_and_changes_nothing(stub, checkpoint, wrong):
    scheduler, allowed = stub
    before = await checksums(scheduler)
    edit, name = WRONG[wrong]
    code, details = await status_of(stage(scheduler, edited(checkpoint(seed=1), allowed / "new", edit)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert name in details
    assert (await status_of(commit(scheduler)))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert await checksums(scheduler) == before


async def test_a_truncated_file_is_named(stub, checkpoint):
    scheduler, allowed = stub
    path = shutil.copytree(checkpoint(seed=1), allowed / "new") / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    code, details = await status_of(stage(scheduler, allowed / "new"))
    assert (code, str(path) in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("path", ["/", "relative", "allowed/../outside", "link", "none", "", "long", "loop"])
async def test_only_the_named_directories_are_read(stub, checkpoint, tmp_path, path):
    scheduler, allowed = stub
    shutil.copytree(checkpoint(seed=1), tmp_path / "outside")
    (allowed / "link").symlink_to(tmp_path / "outside")
    given = {"allowed/../outside": f"{allowed}/../outside", "link": allowed / "link", "none": allowed / "none"}
    (allowed / "loop").symlink_to(allowed / "loop")
    given |= {"long": allowed / ("x" * 300), "loop": allowed / "loop"}
    code, _ = await status_of(stage(scheduler, given.get(path, path)))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)


async def test_without_the_flag_no_directory_is_read(connect, checkpoint):
    scheduler = await connect()
    await scheduler.info()
    code, details = await status_of(stage(scheduler, checkpoint(seed=1)))
    assert (code, "weight_directories=" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)


async def test_a_staged_update_survives_changes_of_its_files_and_is_committed_once(stub, checkpoint):
    scheduler, allowed = stub
    new = shutil.copytree(checkpoint(seed=1), allowed / "new")
    staged = await stage(scheduler, new, version="step 7")
    assert staged.tensors == len(safetensors.torch.load_file(new / "model.safetensors"))
    (new / "model.safetensors").write_bytes(b"")
    version = await commit(scheduler)
    assert (version.version, version.directory) == ("step 7", str(new))
    assert (await scheduler.info()).weights == version
    assert (await status_of(commit(scheduler)))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_update_that_is_discarded_or_replaced_is_not_committed(stub, checkpoint):
    scheduler, allowed = stub
    before = await checksums(scheduler)
    new = shutil.copytree(checkpoint(seed=1), allowed / "new")
    await stage(scheduler, new, "a")
    await scheduler.stub.DiscardWeights(w.DiscardWeightsRequest(update_id="b"))  # has no effect
    await scheduler.stub.DiscardWeights(w.DiscardWeightsRequest(update_id="a"))
    assert (await status_of(commit(scheduler, "a")))[0] is grpc.StatusCode.FAILED_PRECONDITION
    await stage(scheduler, new, "a")
    await stage(scheduler, new, "b")
    assert (await status_of(commit(scheduler, "a")))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert await checksums(scheduler) == before
    await commit(scheduler, "b")
    assert await checksums(scheduler) != before


async def test_steps_after_a_commit_use_the_new_weights(stub, checkpoint, connect, worker):
    scheduler, allowed = stub
    new = shutil.copytree(checkpoint(seed=1), allowed / "new")

    async def first_token(of) -> int:
        await of.connect()
        result = await of.run(
            admissions=[admission(0, PROMPT, range(3), GREEDY)], batch={"slots": [0], "token_counts": [40]}
        )
        of.call.cancel()
        return result.token_ids[0]

    before = await first_token(scheduler)
    await stage(scheduler, new)
    await commit(scheduler)
    fresh = await connect(await worker(model=str(new)))
    await fresh.info()
    assert await checksums(scheduler) == await checksums(fresh)
    assert await first_token(scheduler) == await first_token(fresh) != before


async def test_an_update_whose_caller_leaves_is_forgotten(stub, checkpoint, monkeypatch):
    scheduler, allowed = stub
    new = shutil.copytree(checkpoint(seed=1), allowed / "new")
    began, goes_on = threading.Event(), threading.Event()
    read, forgotten = ModelWeights.stage, threading.Event()
    discard = ModelWeights.discard

    def stage_late(*given):
        began.set()
        goes_on.wait()
        return read(*given)

    def note(weights, update_id):
        discard(weights, update_id)
        forgotten.set()

    monkeypatch.setattr(ModelWeights, "stage", stage_late)
    monkeypatch.setattr(ModelWeights, "discard", note)
    call = scheduler.stub.StageWeights(w.StageWeightsRequest(update_id="u", version="1", directory=str(new)))
    await asyncio.to_thread(began.wait)
    call.cancel()
    await scheduler.info()  # the worker has received the end of the call
    goes_on.set()
    await asyncio.to_thread(forgotten.wait, 60)
    assert (await status_of(commit(scheduler)))[0] is grpc.StatusCode.FAILED_PRECONDITION
