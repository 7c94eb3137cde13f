"""What is kept from one start to the next, and starts that cannot succeed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.worker.boot.common import boot

START = """
import sys
from services.common.config import WorkerConfig
from services.worker.boot.common import boot
boot(WorkerConfig(model=sys.argv[1], page_size=int(sys.argv[2]), kv_cache_num_tokens=1024, torch_num_threads=1))
"""


def start(directory: Path, page_size: int, kept: Path) -> dict[str, int]:
    """Boot in a process of its own; the files of compiled code that are ``kept`` then, and when each was written."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(kept)}
    subprocess.run([sys.executable, "-c", START, str(directory), str(page_size)], check=True, env=environment)
    return {path.name: path.stat().st_mtime_ns for path in kept.rglob("*.nbc")}


@pytest.mark.slow
def test_a_second_start_stores_nothing_and_another_page_size_has_files_of_its_own(checkpoint, tmp_path):
    first = start(checkpoint(), 16, tmp_path)
    assert any("forward" in name for name in first)  # a function that calls others
    assert start(checkpoint(), 16, tmp_path) == first
    both = start(checkpoint(), 8, tmp_path)
    assert first.items() <= both.items()
    added = set(both) - set(first)
    assert sorted(name.split("_")[-2].rsplit(".", 1)[-1] for name in added) == ["attend", "forward", "store"]


def test_a_cache_beyond_all_memory_names_the_flag(checkpoint):
    with pytest.raises(InvalidRequest, match=r"flag kv_cache_num_tokens=1099511627760: the KV cache takes .* GiB"):
        boot(WorkerConfig(model=str(checkpoint()), kv_cache_num_tokens=2**40 - 1, torch_num_threads=1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            "flag kv_cache_dtype=fp8: only on cuda, and this worker runs on cpu; leave it at kv_cache_dtype=auto",
        ),
        (
            {"use_cudagraphs": True},
            "flag use_cudagraphs=T: only on cuda, and this worker runs on cpu; leave it out",
        ),
    ],
)
def test_what_only_cuda_has_is_refused_on_a_cpu(checkpoint, flags, message):
    with pytest.raises(InvalidRequest) as refused:
        boot(WorkerConfig(model=str(checkpoint()), device="cpu", torch_num_threads=1, **flags))
    assert refused.value.message == message
    assert refused.value.field in flags


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("tokenizer.json", "neither tokenizer.json nor tokenizer.model"),
        ("an end", "names no end-of-sequence token"),
        ("nothing", None),
    ],
)
def test_grammars_need_a_tokenizer_and_a_token_that_ends(lacking, reason, checkpoint, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint(), directory)
    if lacking == "tokenizer.json":
        (directory / lacking).unlink()
    if lacking == "an end":
        config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": None}
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "generation_config.json").unlink()
    with capture_logs() as logs:
        runner = boot(WorkerConfig(model=str(directory), kv_cache_num_tokens=1024, torch_num_threads=1)).runner
    assert runner.limits.grammars == (reason is None)
    assert [reason in line["reason"] for line in logs if line["event"] == "no grammars"] == ([True] if reason else [])
    runner.close()


def test_the_tokenizer_may_be_elsewhere(checkpoint, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint(), directory)
    (directory / "tokenizer.json").unlink()
    flags = {"model": str(directory), "tokenizer": str(checkpoint()), "kv_cache_num_tokens": 1024}
    runner = boot(WorkerConfig(**flags, torch_num_threads=1)).runner
    assert runner.limits.grammars
    runner.close()


@pytest.mark.parametrize("most", [0, 3])
def test_the_flag_bounds_the_top_logprobs_that_a_step_returns(checkpoint, most):
    flags = {"model": str(checkpoint()), "kv_cache_num_tokens": 1024, "max_top_logprobs": most}
    runner = boot(WorkerConfig(**flags, torch_num_threads=1)).runner
    assert runner.limits.max_top_logprobs == most
    runner.close()


def test_numba_is_not_loaded_before_a_cpu_needs_it():
    code = "import sys, services.worker.server; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
