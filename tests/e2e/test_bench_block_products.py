"""The measurement of fp8 products with scales of blocks."""

import json
import subprocess
import sys

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bench.block_products", *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_is_refused():
    outcome = run("rows=1")
    assert outcome.returncode == 2
    assert "needs a CUDA device" in outcome.stderr


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["compare", "tune"])
def test_each_shape_is_measured(mode):
    outcome = run(f"mode={mode}", "seconds=3", "rows=1,70", "shapes=512x1024,384x640")
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])["figures"]
    assert [(each["outputs"], each["rows"]) for each in figures] == [(512, 1), (512, 70), (384, 1), (384, 70)]
    assert all((each["us"]["triton"] if mode == "compare" else each["us"]) > 0 for each in figures)
