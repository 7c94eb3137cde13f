"""The trainers of ``examples/rl`` run for two steps, and fail if other weights answered."""

import json
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


def test_grpo_with_trl_trains_on_answers_of_the_weights_of_each_step(tmp_path):
    pytest.importorskip("trl", reason="needs examples/rl/requirements.txt")
    small = ["steps=2", "prompts=2", "samples=4", "max_tokens=48"]
    done = run("-m", "examples.rl.train", *small, f"plot={tmp_path / 'reward.png'}")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert len(steps(lines)) == len(json.loads(last)["rewards"]) == 2
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_trainer_over_grpc_commits_weights_and_samples_from_them(tmp_path):
    with serve(weight_directories=tmp_path, device="cpu", dtype="float32", kv_cache_num_tokens=16 * 1024) as server:
        done = run("examples/rl/trainer.py", server.grpc_address, tmp_path, BUILTIN, 2)
    assert done.returncode == 0, done.stderr
    assert len(steps(done.stdout.splitlines())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_the_page_shows_the_trainer():
    shown = [block.code for block in blocks(ROOT / "docs" / "rollouts.md")]
    assert (ROOT / "examples" / "rl" / "trainer.py").read_text() in shown
