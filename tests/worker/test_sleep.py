"""Sleep of a worker: it computes the same afterwards, and nothing while it sleeps."""

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import gguf
import grpc
import pytest
import safetensors.torch
import torch

from services.common.config import WorkerConfig
from services.common.memory_parts import ALL_PARTS, MemoryPart
from services.worker.boot.common import Booted, boot
from services.worker.engine.sleep import Sleeper
from services.worker.engine.weights import ModelWeights
from tests.gguf_files import write_gguf
from tests.worker.scheduler import admission, status_of
from tests.worker.test_arena import needs_cuda
from tests.worker.test_weights import FLAGS, PROMPT, checksums, commit, generated, stage
from tokasaurus.common.v1 import memory_pb2 as m
from tokasaurus.worker.v1 import sleep_pb2 as s

WEIGHTS, CACHE = m.MEMORY_PART_WEIGHTS, m.MEMORY_PART_KV_CACHE
GPU = {"device": "cuda", "use_cudagraphs": True, "piecewise_cudagraph_max_tokens": 64}


def run_alone(call, is_wanted):
    done: Future[None] = Future()
    call()
    done.set_result(None)
    return done


def sleeper_of(booted: Booted, *directories: Path) -> tuple[Sleeper, ModelWeights]:
    """Return the sleeper and the weights of a rank without a compute thread."""
    weights = ModelWeights(booted.loaded, booted.runner, run_alone, [str(each) for each in directories], "address")
    sleeper = Sleeper.of(booted.loaded, booted.runner, weights, SimpleNamespace(run_alone=run_alone, asleep=False))
    assert sleeper is not None
    return sleeper, weights


def check_weights_are_read_again(booted: Booted) -> None:
    """Check that a worker computes the same after a sleep that drops its weights, and close it."""
    sleeper, weights = sleeper_of(booted)
    expected, sums = generated(booted), weights.checksums()
    sleeper.sleep(ALL_PARTS, 2)
    sleeper.wake(ALL_PARTS)
    assert weights.checksums() == sums
    assert generated(booted) == expected
    booted.runner.close()


CASES = [
    ("llama", {}, {}),
    ("llama", {}, {"load_format": "dummy"}),
    *(("llama", {"tied": True}, {"quantization": each}) for each in ("fp8", "int8", "int4")),
    ("qwen3_moe", {}, {"dtype": "bfloat16"}),
    ("qwen3_moe", {"moe_intermediate_size": 64}, {"quantization": "int4"}),
    pytest.param("llama", {}, {"torch_compile": True}, marks=pytest.mark.slow),
    *(
        pytest.param(*case, marks=[pytest.mark.gpu, needs_cuda, pytest.mark.timeout(600)])
        for case in (
            ("llama", {}, GPU),
            ("llama", {}, GPU | {"load_format": "dummy"}),
            ("llama", {"vocab_size": 416}, GPU | {"quantization": "fp8", "dtype": "bfloat16"}),
            ("qwen3_moe", {}, GPU),
            ("llama", {}, GPU | {"torch_compile": True}),
        )
    ),
]


@pytest.mark.parametrize(("architecture", "arguments", "flags"), CASES)
def test_answers_after_a_sleep_are_those_before(checkpoint, architecture, arguments, flags):
    booted = boot(WorkerConfig(model=str(checkpoint(architecture, **arguments)), **FLAGS | flags))
    sleeper, weights = sleeper_of(booted)
    tensors = list(booted.loaded.model.state_dict().values())
    expected, sums, addresses = generated(booted), weights.checksums(), [tensor.data_ptr() for tensor in tensors]
    for level in (1, 2, 1):
        began = time.perf_counter()
        assert sleeper.sleep(ALL_PARTS, level) > 0
        asleep = time.perf_counter()
        assert sleeper.settled_parts() == ALL_PARTS
        if flags.get("device") != "cuda":
            assert not any(tensor.view(torch.uint8).any() for tensor in tensors)
        sleeper.wake(ALL_PARTS)
        print(f"level {level}: asleep after {asleep - began:.3f} s, awake after {time.perf_counter() - asleep:.3f} s")
        assert sleeper.settled_parts() == frozenset()
        assert weights.checksums() == sums
        assert generated(booted) == expected
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    booted.runner.close()


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16"}, {"quantization": "fp8"}])
def test_dropped_weights_are_read_again_from_a_gguf_file(checkpoint, tmp_path, flags):
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama"), kind=gguf.GGMLQuantizationType.Q8_0)
    booted = boot(WorkerConfig(model=str(path), **FLAGS | flags))
    check_weights_are_read_again(booted)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.timeout(600)
def test_a_device_is_free_while_a_worker_sleeps(checkpoint):
    before = torch.cuda.mem_get_info(0)[0]
    booted = boot(WorkerConfig(model=str(checkpoint()), load_format="dummy", device="cuda"))  # takes all memory
    sleeper, _ = sleeper_of(booted)
    expected, awake = generated(booted), torch.cuda.mem_get_info(0)[0]
    released = sleeper.sleep(ALL_PARTS, 1)
    free, total = torch.cuda.mem_get_info(0)
    print(f"free: {before} before the start, {awake} awake, {free} asleep, of {total}; {released} given back")
    assert free >= awake + released
    assert free >= 0.95 * before
    taken = torch.ones(int(0.9 * free), dtype=torch.uint8, device="cuda")
    with pytest.raises(Exception, match=r"weights and kv_cache need .* GiB are free"):
        sleeper.wake(ALL_PARTS)
    assert sleeper.settled_parts() == ALL_PARTS
    del taken
    torch.cuda.empty_cache()
    sleeper.wake(ALL_PARTS)
    assert generated(booted) == expected
    booted.runner.close()


@pytest.fixture
async def scheduler(worker, connect, checkpoint, tmp_path):
    """A scheduler of a worker whose checkpoint and updates are in ``tmp_path``."""
    for seed, name in enumerate(("old", "new")):
        shutil.copytree(checkpoint(seed=seed), tmp_path / name)
    scheduler = await connect(await worker(model=str(tmp_path / "old"), weight_directories=(str(tmp_path),)))
    assert (await scheduler.info()).sleeps
    return scheduler


async def sleep(scheduler, *parts: int, level: int = 1) -> int:
    return (await scheduler.stub.Sleep(s.SleepRequest(parts=parts, level=level))).released_bytes


async def wake(scheduler, *parts: int) -> None:
    await scheduler.stub.Wake(s.WakeRequest(parts=parts))


async def asleep(scheduler) -> list[int]:
    return list((await scheduler.info()).asleep)


async def first_token(scheduler) -> int:
    await scheduler.connect()
    admitted = [admission(0, PROMPT, range(3))]
    result = await scheduler.run(admissions=admitted, batch={"slots": [0], "token_counts": [40]})
    scheduler.call.cancel()
    return result.token_ids[0]


async def refusal(call) -> str:
    code, details = await status_of(call)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    return details


async def test_plans_are_refused_until_all_parts_are_awake(scheduler):
    expected = await first_token(scheduler)
    assert await sleep(scheduler) > 0
    assert await asleep(scheduler) == [WEIGHTS, CACHE]
    assert await sleep(scheduler) == 0
    assert "is asleep" in await refusal(first_token(scheduler))
    await wake(scheduler, WEIGHTS)
    assert await asleep(scheduler) == [CACHE]
    assert "is asleep" in await refusal(first_token(scheduler))
    await wake(scheduler)
    await wake(scheduler)  # has no effect
    assert await asleep(scheduler) == []
    assert await first_token(scheduler) == expected


@pytest.mark.parametrize("level", [1, 2])
async def test_weights_are_replaced_when_they_are_awake(scheduler, tmp_path, level):
    before = await checksums(scheduler)
    await sleep(scheduler, level=level)
    await stage(scheduler, tmp_path / "new", version="7")
    assert "weights are asleep" in await refusal(commit(scheduler))
    assert "weights are asleep" in await refusal(checksums(scheduler))
    await wake(scheduler, WEIGHTS)
    await stage(scheduler, tmp_path / "new", version="8")
    assert (await commit(scheduler)).version == "8"
    after = await checksums(scheduler)
    assert after != before
    await wake(scheduler, CACHE)
    assert await checksums(scheduler) == after
    assert (await scheduler.info()).weights.version == "8"


async def test_dropped_weights_are_those_of_the_last_commit_afterwards(scheduler, tmp_path):
    await stage(scheduler, tmp_path / "new", version="8")
    await commit(scheduler)
    sums, expected = await checksums(scheduler), await first_token(scheduler)
    await sleep(scheduler)
    await sleep(scheduler, WEIGHTS, level=2)
    await wake(scheduler, WEIGHTS)
    assert "were dropped" in await refusal(checksums(scheduler))
    await wake(scheduler)
    assert await checksums(scheduler) == sums
    assert await first_token(scheduler) == expected


@pytest.mark.parametrize("change", ["removed", "changed"])
async def test_weights_whose_files_have_changed_are_never_used(scheduler, tmp_path, change):
    await sleep(scheduler, level=2)
    path = tmp_path / "old" / "model.safetensors"
    if change == "removed":
        path.unlink()
    else:
        tensors = safetensors.torch.load_file(path)
        tensors["model.norm.weight"][3] += 1
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    for parts, left in (((), [WEIGHTS, CACHE]), ((WEIGHTS,), [CACHE]), ((CACHE,), [CACHE])):
        if parts == (WEIGHTS,):
            await wake(scheduler, *parts)
        else:
            assert str(tmp_path / "old") in await refusal(wake(scheduler, *parts))
        assert await asleep(scheduler) == left
        assert "is asleep" in await refusal(first_token(scheduler))
    await stage(scheduler, tmp_path / "new", version="8")
    await commit(scheduler)
    await wake(scheduler)
    assert isinstance(await first_token(scheduler), int)


async def test_a_part_that_sleeps_alone(scheduler):
    expected, sums = await first_token(scheduler), await checksums(scheduler)
    await sleep(scheduler, CACHE)
    assert await checksums(scheduler) == sums
    await wake(scheduler)
    await sleep(scheduler, WEIGHTS, level=2)
    await wake(scheduler)
    assert await first_token(scheduler) == expected


@pytest.mark.parametrize(
    "request_", [s.SleepRequest(level=0), s.SleepRequest(level=3), s.SleepRequest(level=1, parts=[9])]
)
async def test_a_wrong_call_is_refused(scheduler, request_):
    code, details = await status_of(scheduler.stub.Sleep(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected" in details
    assert await asleep(scheduler) == []


async def test_a_model_that_runs_through_transformers_cannot_sleep(connect, worker):
    scheduler = await connect(await worker(model_impl="transformers"))
    assert not (await scheduler.info()).sleeps
    assert "cannot sleep" in await refusal(sleep(scheduler))


def test_too_little_host_memory_changes_nothing(checkpoint, monkeypatch):
    booted = boot(WorkerConfig(model=str(checkpoint()), **FLAGS))
    sleeper, _ = sleeper_of(booted)
    with monkeypatch.context() as patched:
        patched.setattr("services.worker.arena.host_copy.available_memory", lambda: 1000)
        with pytest.raises(Exception, match="level 2"):
            sleeper.sleep(ALL_PARTS, 1)
    assert sleeper.settled_parts() == frozenset()
    sleeper.sleep(frozenset({MemoryPart.WEIGHTS}), 2)
    sleeper.wake(ALL_PARTS)
    booted.runner.close()
