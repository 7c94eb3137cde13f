"""A trainer shares weights by CUDA IPC with workers on its GPU, and on another GPU of its host."""

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from bench.server import Server, serve
from examples.rl.ipc import share
from tests.checkpoints import make_checkpoint
from tests.docs.pages import ROOT
from tests.e2e.test_weights import answers, checksums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),  # a first start compiles
]

TIMEOUT_S = 300
NORM = "model.norm.weight"
FLAGS = {"device": "cuda", "kv_cache_num_tokens": 64 * 1024}  # leaves memory for the trainer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for seed in range(3):
        make_checkpoint(directory / str(seed), "llama", seed=seed, vocab_size=416)  # a size that fp8 products take
    return directory


def push(server: Server, checkpoint: Path) -> None:
    """Replace the weights as a trainer on the first GPU."""
    trainer = [sys.executable, "examples/rl/ipc.py", server.base_url, str(checkpoint)]
    subprocess.run(trainer, cwd=ROOT, check=True, timeout=TIMEOUT_S)


def versions(server: Server) -> list[str]:
    schedulers = httpx.get(f"{server.base_url}/weights", timeout=TIMEOUT_S).json()["schedulers"]
    return [each["version"] for each in schedulers]


def refused(server: Server, place: dict) -> str:
    """Return the error of an update of one tensor in the memory at ``place``."""
    info = {"names": [NORM], "dtype_names": ["float32"], "shapes": [[64]], "ipc_handles": [{"any": place}]}
    response = httpx.post(f"{server.base_url}/update_weights", json={"update_info": info}, timeout=TIMEOUT_S)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize("flags", [{}, {"quantization": "fp8"}, {"tp_size": 2}], ids=["bf16", "fp8", "tp"])
def test_copied_weights_are_those_of_a_fresh_server(checkpoints, flags):
    if torch.cuda.device_count() < flags.get("tp_size", 1):
        pytest.skip("needs more CUDA devices")
    with serve(model=checkpoints / "0", weight_directories=checkpoints, **FLAGS | flags) as server:
        before = asyncio.run(answers(server))
        for name in "12":
            push(server, checkpoints / name)
            assert versions(server) == [name]
        after, sums = asyncio.run(answers(server)), checksums(server)
    with serve(model=checkpoints / "2", **FLAGS | flags) as fresh:
        assert checksums(fresh) == sums
        assert asyncio.run(answers(fresh)) == after != before


def test_memory_that_cannot_be_used_changes_nothing(checkpoints):
    tensor = torch.full((64,), float("nan"), device="cuda")
    place = share(tensor)
    torch.cuda.synchronize()
    with serve(model=checkpoints / "0", weight_directories=checkpoints, **FLAGS) as server:
        before = checksums(server)
        for handle in (bytes(64), os.urandom(64)):
            message = refused(server, place | {"handle": base64.b64encode(handle).decode()})
            assert (NORM in message, "cannot be opened" in message) == (True, True), message
        message = refused(server, place | {"offset": 2**40})
        assert (NORM in message, "of an allocation of" in message) == (True, True), message
        message = refused(server, place)
        assert (NORM in message, "not finite" in message) == (True, True), message
        assert checksums(server) == before
        push(server, checkpoints / "1")
        assert versions(server) == ["1"]


def test_the_driver_does_what_the_worker_relies_on():
    checks = [sys.executable, "-m", "tests.e2e.cuda_ipc_checks"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "protos")))}
    done = subprocess.run(checks, cwd=ROOT, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
