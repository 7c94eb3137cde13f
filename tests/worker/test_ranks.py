"""``toka-workers``: the ranks of a replica as one program, which live and die together."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.server import free_port
from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import build, load
from services.worker import ranks
from services.worker.ranks import rank_environments, rank_flags
from tests.gateway.deployment import BOOT_S, Process, eventually


def config(**flags) -> WorkerConfig:
    return build(WorkerConfig, flags)


def test_each_rank_has_its_place_and_its_ports():
    arguments = ["--tp-size=2", "pp_size=2", "worker_listen=127.0.0.1:7000", "metrics_port=8000", "model=builtin"]
    own = load(WorkerConfig, arguments, {})
    made = [load(WorkerConfig, flags, {}) for flags in rank_flags(own, arguments)]
    assert [(rank.pp_rank, rank.tp_rank) for rank in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.worker_listen for rank in made] == [f"127.0.0.1:{7000 + index}" for index in range(4)]
    assert [rank.metrics_port for rank in made] == [8000, 8001, 8002, 8003]
    assert {(rank.tp_size, rank.pp_size, rank.model) for rank in made} == {(2, 2, "builtin")}


@pytest.mark.parametrize(
    ("environment", "seen"),
    [({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "5,GPU-7,9"}, ["5", "GPU-7"])],
    ids=["all", "named"],
)
def test_each_rank_sees_a_gpu_of_its_own(environment: dict[str, str], seen: list[str]):
    own = rank_environments(config(tp_size=2, device="cuda"), environment | {"PATH": "/bin"})
    assert [(each["CUDA_VISIBLE_DEVICES"], each["PATH"]) for each in own] == [(name, "/bin") for name in seen]


def test_too_few_gpus_are_refused():
    with pytest.raises(InvalidRequest, match="2 ranks need a GPU each, and CUDA_VISIBLE_DEVICES=3 shows 1"):
        list(rank_environments(config(tp_size=2, device="cuda"), {"CUDA_VISIBLE_DEVICES": "3"}))


def test_ranks_on_a_cpu_divide_the_processors_of_their_container(monkeypatch):
    monkeypatch.setattr(ranks, "usable_processors", lambda: 6)
    own = list(rank_environments(config(tp_size=2, device="cpu"), {}))
    assert [int(each["TOKA_TORCH_NUM_THREADS"]) for each in own] == [3] * 2
    chosen = rank_environments(config(tp_size=2, device="cpu", torch_num_threads=2), {"TOKA_TORCH_NUM_THREADS": "2"})
    assert [each["TOKA_TORCH_NUM_THREADS"] for each in chosen] == ["2", "2"]


def test_hidden_gpus_stay_hidden():
    with pytest.raises(InvalidRequest, match="2 ranks need a GPU each, and CUDA_VISIBLE_DEVICES= shows 0"):
        list(rank_environments(config(tp_size=2, device="cuda"), {"CUDA_VISIBLE_DEVICES": ""}))


@pytest.mark.parametrize("flags", [{"tp_size": 2, "tp_rank": 1}, {"worker_listen": "unix:/tmp/worker"}], ids=str)
def test_what_it_chooses_itself_is_refused(flags: dict):
    with pytest.raises(InvalidRequest, match="numbers its ranks and counts up from the port"):
        list(rank_flags(config(**flags), []))


@pytest.fixture
def start(tmp_path: Path):
    """A replica on CPU with two ranks, and these flags."""
    started: list[Process] = []

    def workers(**flags) -> Process:
        flags = {"tp_size": 2, "device": "cpu", "master_port": free_port(), "kv_cache_num_tokens": 1024} | flags
        flags |= {"worker_listen": f"127.0.0.1:{free_port()}"}
        started.append(Process(tmp_path / "workers.log", "services.worker.ranks", **flags))
        return started[-1]

    yield workers
    for process in started:
        process.stop()


def ranks_of(process: Process) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "services.worker" in child.cmdline()]


def ended(processes: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def test_when_a_rank_dies_all_end_with_its_status(start):
    process = start()
    eventually(lambda: len(ranks_of(process)) == 2, BOOT_S)
    ranks = ranks_of(process)
    ranks[1].send_signal(signal.SIGKILL)
    assert process.wait() == 128 + signal.SIGKILL
    eventually(ended(ranks))
    assert "rank 1 ended with status -9, and the others with it" in process.log.read_text()


def test_a_rank_that_cannot_begin_ends_all_with_the_reason(start):
    process = start(compile_cache_dir="/proc/nowhere")
    assert process.wait() == 1
    assert "/proc/nowhere" in process.log.read_text()


def test_sigterm_ends_all_in_good_order(start):
    process = start()
    eventually(lambda: len(ranks_of(process)) == 2, BOOT_S)
    ranks = ranks_of(process)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    eventually(ended(ranks))
