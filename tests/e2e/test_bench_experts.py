"""The measurement of the experts' kernels: other libraries compute the same, and the search tries what can run."""

import json
import subprocess
import sys

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bench.experts", *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_is_refused():
    outcome = run("shape=tiny")
    assert outcome.returncode == 2
    assert "needs a CUDA device" in outcome.stderr


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_other_libraries_compute_the_same(weights):
    from bench.expert_layers import SHAPES, make_layer, make_weights, torch_mix
    from services.worker.layers.cuda_kernels import CudaKernels

    for shape in (SHAPES["tiny"], SHAPES["gpt-oss-20b"]._replace(width=640, hidden=320)):
        layer = make_layer(shape, 100, 1.0, make_weights(shape, weights, 0), 0)
        found, expected = CudaKernels().mix(*layer, shape.activation).float(), torch_mix(shape, layer).float()
        assert (found - expected).norm() / expected.norm() < 0.03


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize("mode", ["compare", "tune"])
def test_each_number_of_tokens_is_measured(mode, weights):
    outcome = run("shape=tiny", f"mode={mode}", f"weights={weights}", "seconds=5", "tokens=1,70", "layers=2")
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])["figures"]
    assert [each["tokens"] for each in figures] == [1, 70]
    assert all(each["ours" if mode == "compare" else "ms"] > 0 for each in figures)
