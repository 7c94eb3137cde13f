"""Kernels that a child process compiles for a start: those that its rehearsal launches, for an absent GPU."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from structlog.testing import capture_logs

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.worker.boot.precompile.background import KernelCompiler, can_precompile
from services.worker.boot.precompile.job import GpuTarget, Job
from services.worker.boot.progress import BootProgress, StartTimes
from tests.quantized_files import change_config
from tests.worker.interpreter import needs_triton

GPU = GpuTarget(name="a GPU", capability=(9, 0), memory=80 << 30, flashinfer=False)
# What the child does, but only the first compilations.
REHEARSE = """
import json, sys
from services.worker.boot.precompile.dry_rehearsal import rehearse_dry
from services.worker.boot.precompile.compiler import CompilerPool
from services.worker.boot.precompile.job import Job
job, pool, launches = Job.model_validate_json(sys.stdin.buffer.read()), None, []
def on_launch(launch):
    launches.append(launch)
    if len(launches) <= int(sys.argv[1]):
        pool.compile(launch)
pool = CompilerPool(job.gpu.capability)
rehearse_dry(job, on_launch)
compiled = pool.close()
print(json.dumps({"kernels": [launch.kernel.__name__ for launch in launches], "compiled": compiled}))
"""

# Prints the largest shared memory of a kernel in bytes.
MEASURE = """
import sys
from triton.runtime import driver
from services.worker.boot.precompile.compiler import AbsentDriver
from services.worker.boot.precompile.dry_rehearsal import rehearse_dry
from services.worker.boot.precompile.job import Job
job, launches = Job.model_validate_json(sys.stdin.buffer.read()), []
driver.set_active(AbsentDriver(job.gpu.capability))
rehearse_dry(job, launches.append)
print(max(launch.compile().metadata.shared for launch in launches))
"""


def job(model, gpu: GpuTarget = GPU, **flags) -> Job:
    sizes = {"max_seqs_per_forward": 64, "max_tokens_per_forward": 256, "kv_cache_num_tokens": 4096}
    flags = {"load_format": "dummy", "use_cudagraphs": True} | sizes | flags
    config = ChosenWorkerConfig(model=str(model), **flags)
    return Job(config=config, dtype="bfloat16", gpu=gpu)


def environment(cache) -> dict[str, str]:
    """Return the environment of a process that compiles kernels. Tests on a CPU interpret them otherwise."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(cache)}


def rehearse(job: Job, cache, compiled: int = 0) -> dict:
    """Return the names of the launched kernels, and how many of the first ``compiled`` could be compiled."""
    done = subprocess.run(
        [sys.executable, "-c", REHEARSE, str(compiled)],
        input=job.model_dump_json().encode(),
        env=environment(cache),
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
def test_what_the_rehearsal_launches_is_compiled_into_the_cache_without_a_device(checkpoint, tmp_path):
    found = rehearse(job(checkpoint(), cudagraph_max_size=16), tmp_path, compiled=3)
    assert found["compiled"] == 3
    assert len(list(tmp_path.rglob("*.cubin"))) == 3
    # From each part of a step: its inputs, products, attention, sampling.
    assert {"_append_and_gather_inputs", "product", "_norm", "_attend", "pick", "penalise"} <= set(found["kernels"])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "wide"), [(480, True), (479, False)])
def test_the_kernels_of_wide_prefixes_are_among_them_if_a_step_has_enough_rows(checkpoint, tmp_path, rows, wide):
    model = checkpoint(hidden_size=256, num_attention_heads=256, num_key_value_heads=64, head_dim=64)
    found = rehearse(job(model, max_seqs_per_forward=rows, max_tokens_per_forward=1024), tmp_path)
    assert ({"copy_prefixes", "attend_prefixes"} <= set(found["kernels"])) == wide


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"return_routed_experts": True}, {"quantization": "int4"}], ids=str)
def test_the_kernels_of_experts_are_among_them(checkpoint, tmp_path, flags):
    model = checkpoint("qwen3_moe", moe_intermediate_size=64)
    kernels = set(rehearse(job(model, **flags), tmp_path)["kernels"])
    assert {"_route", "_place", "_products", "_sum"} <= kernels
    assert ({"experts_wide", "_gather"} <= kernels) == (flags.get("quantization") == "int4")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(600)  # up to 70 compilations
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ({"architecture": "llama"}, {}),
        ({"architecture": "qwen3"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        ({"architecture": "llama"}, {"quantization": "int4"}),
        ({"architecture": "qwen2", "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}, {}),
        ({"architecture": "llama"}, {"tp_size": 2}),
        ({"architecture": "gpt_oss"}, {}),
        ({"architecture": "glm4_moe"}, {"quantization": "fp8"}),
        ({"architecture": "glm4_moe", "moe_intermediate_size": 64}, {"quantization": "int4"}),
    ],
    ids=["llama", "fp8", "int4", "windows and biases", "two ranks", "experts", "experts in fp8", "experts with int4"],
)
def test_every_kernel_of_a_start_can_be_compiled(checkpoint, tmp_path, model, flags):
    """Triton's interpreter accepts more than its compiler: a variable may change its type there."""
    found = rehearse(job(checkpoint(**model), **flags), tmp_path, compiled=1000)
    assert len(found["kernels"]) > 30
    assert ("grouped_wide" in found["kernels"]) == (flags.get("quantization") == "int4")
    assert found["compiled"] == len(found["kernels"])


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(600)  # up to 90 compilations
@pytest.mark.parametrize(("capability", "most"), [((8, 0), 163 << 10), ((8, 9), 99 << 10)])
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ({"architecture": "llama"}, {}),
        ({"architecture": "llama"}, {"quantization": "int8"}),
        ({"architecture": "qwen3_moe"}, {}),
        ({"architecture": "qwen3_moe", "moe_intermediate_size": 256}, {"quantization": "int4"}),
    ],
    ids=["llama", "int8", "experts", "experts with int4"],
)
def test_every_kernel_fits_into_the_shared_memory_of_earlier_gpus(checkpoint, tmp_path, model, flags, capability, most):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=job(checkpoint(**model), GPU._replace(capability=capability), **flags).model_dump_json().encode(),
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert int(done.stdout.splitlines()[-1]) <= most


@needs_triton
@pytest.mark.parametrize(
    ("flags", "gpu", "absent"),
    [
        # Without the decoder for few rows, which needs one rank.
        pytest.param({"tp_size": 2}, GPU, "norm_rows", marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "fp8"}, GPU, None, marks=pytest.mark.slow),
        pytest.param({}, GPU._replace(flashinfer=True), None, marks=pytest.mark.slow),
        pytest.param({"use_cudagraphs": False}, GPU, "_append_and_gather_inputs", marks=pytest.mark.slow),
    ],
    ids=["two ranks", "an fp8 cache", "FlashInfer", "no graphs"],
)
def test_every_kind_of_start_can_be_rehearsed_without_a_device(checkpoint, tmp_path, flags, gpu, absent):
    kernels = set(rehearse(job(checkpoint(), gpu, **flags), tmp_path)["kernels"])
    assert {"_norm", "_attend", "pick"} <= kernels
    assert absent not in kernels


@pytest.mark.slow
@needs_triton
def test_weights_in_act_order_are_multiplied_by_kernels_that_take_permuted_rows(checkpoint, tmp_path):
    """The decoder for few rows does not permute rows."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    kernels = {}
    for order in (False, True):
        model = shutil.copytree(checkpoint(), tmp_path / f"order-{order}")
        change_config(model, quantization_config=settings | {"desc_act": order})
        kernels[order] = set(rehearse(job(model, quantization="checkpoint"), tmp_path)["kernels"])
    assert {"grouped_rows", "grouped_tiles"} <= kernels[False] & kernels[True]
    assert "norm_rows" in kernels[False] - kernels[True]


def test_a_child_that_fails_or_cannot_be_started_changes_nothing(tmp_path, monkeypatch):
    with contextlib.closing(KernelCompiler.start()) as compiler:
        compiler.compile(job(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with capture_logs() as logs:
        assert KernelCompiler.start() is None
    assert [line["event"] for line in logs] == ["kernels are not compiled ahead"]


def test_a_child_without_a_job_ends_with_the_worker():
    """Also while another process holds the pipe of the job open."""
    worker = """
import os, pathlib, subprocess
from services.worker.boot.precompile.background import KernelCompiler
compiler = KernelCompiler.start()
print(pathlib.Path("/proc/thread-self/children").read_text(), end="", flush=True)
pipe = compiler._child.stdin.fileno()
print(subprocess.Popen(["sleep", "600"], pass_fds=[pipe], stdout=subprocess.DEVNULL).pid, flush=True)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", worker], stdout=subprocess.PIPE)
    child, holder = map(int, done.stdout.split())
    try:
        assert not runs(child)
    finally:
        os.kill(holder, signal.SIGKILL)


def test_processes_of_a_child_that_was_killed_end_with_its_context(tmp_path, monkeypatch):
    program, pid_pipe = tmp_path / "program", tmp_path / "pid"
    os.mkfifo(pid_pipe)
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {pid_pipe}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with contextlib.closing(KernelCompiler.start()):
        started = int(pid_pipe.read_text())
    assert not runs(started)


@needs_triton
def test_processes_that_compile_end_with_the_process_that_made_them():
    maker = """
import os, pathlib
from services.worker.boot.precompile.compiler import CompilerPool
pool = CompilerPool((9, 0))
print(pathlib.Path("/proc/thread-self/children").read_text(), flush=True)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", maker], stdout=subprocess.PIPE)
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    for pid in pids:
        assert not runs(pid)


def test_a_child_that_is_not_needed_any_more_ends_with_its_children(tmp_path, monkeypatch):
    program = tmp_path / "program"
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {pids}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with contextlib.closing(KernelCompiler.start()):
        started = [int(pid) for pid in pids.read_text().split()]
    for pid in started:
        assert not runs(pid)


@pytest.mark.parametrize(
    ("flags", "visible", "compiles"),
    [
        ({"device": "auto"}, "0", True),
        ({"device": "auto"}, "-1", False),
        ({"device": "cpu"}, "0", False),
        ({"device": "cuda", "torch_compile": True}, "0", False),
        ({"device": "cuda", "tp_size": 2, "tp_rank": 1}, "0,1", False),
        ({"device": "cuda", "pp_size": 2}, "0,1", False),
    ],
)
def test_the_first_rank_on_a_gpu_starts_the_compiler_of_kernels(flags, visible, compiles, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert can_precompile(WorkerConfig(**flags)) == compiles


def runs(pid: int) -> bool:
    """Return whether a killed process still runs after a minute. A zombie does not run."""
    give_up_at = time.monotonic() + 60
    while time.monotonic() < give_up_at:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return False
        except FileNotFoundError:
            return False
        time.sleep(0.01)
    return True


def test_a_start_is_the_first_one_until_one_like_it_has_ended(tmp_path):
    config = WorkerConfig(compile_cache_dir=str(tmp_path))
    progress = BootProgress(StartTimes(config))
    assert progress.first_start
    with progress.phase("weights"):
        pass
    progress.finish()
    assert not BootProgress(StartTimes(config)).first_start
    assert BootProgress(StartTimes(config.model_copy(update={"quantization": "fp8"}))).first_start
