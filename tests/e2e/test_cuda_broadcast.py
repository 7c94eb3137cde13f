"""A trainer on one GPU broadcasts weights with NCCL to a worker on another one."""

import os
import subprocess
import sys

import httpx
import pytest
import torch

from bench.server import serve
from tests.checkpoints import make_checkpoint
from tests.e2e.test_weights import checksums

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TIMEOUT_S = 300


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", [{}, {"quantization": "fp8"}], ids=["bfloat16", "fp8"])
def test_received_weights_are_those_of_a_fresh_server(tmp_path, monkeypatch, flags):
    for seed in (0, 1):
        make_checkpoint(tmp_path / str(seed), "qwen3", seed=seed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the server
    flags = {"device": "cuda", "kv_cache_num_tokens": 64 * 1024} | flags
    with serve(model=tmp_path / "0", weight_directories=tmp_path, **flags) as server:
        trainer = [sys.executable, "examples/rl/broadcast.py", server.base_url, str(tmp_path / "1")]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
        for _ in range(2):  # each with a new group
            subprocess.run(trainer, check=True, timeout=TIMEOUT_S, env=environment)
        sums = checksums(server)
        [scheduler] = httpx.get(f"{server.base_url}/weights", timeout=TIMEOUT_S).json()["schedulers"]
        assert scheduler["version"] == "step-1"
    with serve(model=tmp_path / "1", **flags) as fresh:
        assert checksums(fresh) == sums
