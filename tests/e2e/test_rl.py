"""The trainers of ``examples/rl`` run for two steps, and fail if other weights answered."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from bench.server import serve
from services.common.model.files import BUILTIN
from tests.docs.pages import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*arguments: object) -> subprocess.CompletedProcess:
    # One thread computes faster than several if other tests run beside this one.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def steps(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith("step ")]


def test_a_trainer_over_grpc_commits_weights_and_samples_from_them(tmp_path):
    with serve(weight_directories=tmp_path, device="cpu", dtype="float32", kv_cache_num_tokens=16 * 1024) as server:
        done = run("examples/rl/trainer.py", server.grpc_address, tmp_path, BUILTIN, 2)
    assert done.returncode == 0, done.stderr
    assert len(steps(done.stdout.splitlines())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_the_page_shows_the_trainer():
    shown = [block.code for block in blocks(ROOT / "docs" / "rollouts.md")]
    assert (ROOT / "examples" / "rl" / "trainer.py").read_text() in shown
