"""Checkpoints, reference models and workers, kept for the test session where they can be shared."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import grpc
import pytest
import torch
import transformers

from services.common.config import WorkerConfig
from services.common.process.service import Stop
from services.worker.boot.common import boot
from services.worker.models import fused_cpu
from services.worker.runner.runner import StepRunner
from services.worker.server import serve
from tests.checkpoints import make_checkpoint
from tests.worker.driver import Driver
from tests.worker.scheduler import Scheduler

CheckpointMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> CheckpointMaker:
    """``checkpoint("llama", tied=True, ...)``: its directory, made once for each set of arguments."""

    made: dict[tuple[str, str], Path] = {}

    def make(architecture: str = "llama", **arguments) -> Path:
        key = architecture, repr(sorted(arguments.items()))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("model") / architecture, architecture, **arguments)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], torch.nn.Module]:
    """``reference(directory)``: the model as transformers runs it, in float32."""

    @cache
    def load(directory: Path) -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    return load


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """The decoder that takes seconds to compile is compiled once for each set of sizes, not for each worker."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fused_cpu, "make_forward", cache(fused_cpu.make_forward))
        yield


@pytest.fixture(scope="session")
def runner_for(checkpoint):
    """``runner_for(page_size=16, ...)``: a driver over a booted runner, shared and reset between tests."""

    @cache
    def booted(directory: Path, flags: tuple) -> Driver:
        return Driver(boot(WorkerConfig(model=str(directory), **dict(flags))).runner)

    def get(directory: Path | None = None, **flags) -> Driver:
        settings = {"device": "cpu", "page_size": 16, "kv_cache_num_tokens": 16 * 1024, "torch_num_threads": 2} | flags
        driver = booted(directory or checkpoint(), tuple(sorted(settings.items())))
        driver.reset()
        return driver

    return get


@pytest.fixture
async def worker(checkpoint, tmp_path):
    """``await worker(flag=value, ...)`` starts a worker on a socket of its own and returns its address."""
    running = []

    async def start(**flags) -> str:
        stop, listening = Stop(), asyncio.get_running_loop().create_future()
        settings = {"kv_cache_num_tokens": 16 * 256, "max_seqs_per_forward": 8, "max_tokens_per_forward": 64}
        settings |= {
            "device": "cpu",
            "model": str(checkpoint()),
            "worker_listen": f"unix:{tmp_path}/worker{len(running)}",
        }
        task = asyncio.create_task(serve(WorkerConfig(**settings | flags), stop, listening=listening))
        running.append((stop, task))
        return await listening

    yield start
    for stop, task in running:
        stop.set()
        await task


@pytest.fixture
async def connect(worker):
    """``await connect(address)``: a scheduler on a channel of its own, without a stream yet."""
    channels = []

    async def open_channel(address: str | None = None) -> Scheduler:
        channels.append(grpc.aio.insecure_channel(address or await worker()))
        return Scheduler(channels[-1])

    yield open_channel
    for channel in channels:
        await channel.close()


@pytest.fixture
def gate(monkeypatch):
    """While it is clear no step runs."""
    opened, run = threading.Event(), StepRunner.run

    def gated(self, plan):
        if threading.current_thread().name == "compute":
            opened.wait()
        return run(self, plan)

    monkeypatch.setattr(StepRunner, "run", gated)
    yield opened
    opened.set()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what torch has compiled, before the test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def allowed(tmp_path) -> Path:
    """A directory from which workers may read weights."""
    directory = tmp_path / "allowed"
    directory.mkdir()
    return directory


@pytest.fixture
async def scheduler(worker, connect, allowed) -> Scheduler:
    """A scheduler of a worker that has loaded its model and takes new weights."""
    scheduler = await connect(await worker(weight_directories=(str(allowed),)))
    await scheduler.info()
    return scheduler
