"""Phases of a start: what is said of them, and what the next start knows."""

import json

import pytest
from structlog.testing import capture_logs

from services.common.config import WorkerConfig
from services.common.process.progress import READY, ProgressFile
from services.worker.boot.progress import BootProgress, StartTimes


def config_of(directory, **flags) -> WorkerConfig:
    return WorkerConfig(compile_cache_dir=str(directory), **flags)


def start(config: WorkerConfig, *phases: str) -> list[dict]:
    with capture_logs() as lines:
        progress = BootProgress(StartTimes(config))
        for phase in phases:
            with progress.phase(phase):
                pass
        progress.finish()
    return lines


def test_each_phase_is_a_log_line_and_the_last_one_has_their_seconds(tmp_path):
    *phases, end = start(config_of(tmp_path), "imports", "weights")
    assert [(line["phase"], line["event"]) for line in phases] == [
        ("imports", "loading libraries"),
        ("weights", "loading weights"),
    ]
    assert end["event"] == "started"
    assert end["phases"].keys() == {"imports", "weights"}


def test_the_first_start_says_so_and_the_second_how_long_the_first_took(tmp_path):
    first, second = (start(config_of(tmp_path / "new"), "weights")[0] for _ in range(2))
    assert first["first_start"]
    assert "usually_s" not in first
    assert second["usually_s"] >= 0
    assert "first_start" not in second


def test_a_start_with_other_flags_is_a_first_one_and_with_another_address_is_not(tmp_path):
    start(config_of(tmp_path), "weights")
    assert "first_start" in start(config_of(tmp_path, torch_compile=True), "weights")[0]
    assert "usually_s" in start(config_of(tmp_path, worker_listen="127.0.0.1:1", log_level="DEBUG"), "weights")[0]


def test_one_rank_of_a_replica_keeps_the_times_and_all_read_them(tmp_path):
    other = config_of(tmp_path, tp_size=2, tp_rank=1)
    start(other, "weights")
    assert StartTimes(other).read() == {}
    start(config_of(tmp_path, tp_size=2), "weights")
    assert StartTimes(other).read().keys() == {"weights"}


def test_a_phase_inside_another_is_not_counted_twice():
    ticks = iter((0.0, 1.0, 4.0, 4.5))
    progress = BootProgress(clock=lambda: next(ticks))
    with progress.phase("rehearsal"), progress.phase("graphs"):
        pass
    assert progress.seconds == {"rehearsal": 1.5, "graphs": 3.0}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}'])
def test_a_file_that_is_damaged_is_replaced(tmp_path, content):
    (tmp_path / "starts.json").write_text(content)
    start(config_of(tmp_path), "weights")
    assert StartTimes(config_of(tmp_path)).read().keys() == {"weights"}


def test_a_directory_that_cannot_be_written_stops_no_start():
    start(config_of("/proc/nowhere"), "weights")


def test_the_file_keeps_the_newest_starts(tmp_path):
    for tokens in range(1, 206):
        StartTimes(config_of(tmp_path, max_tokens_per_forward=tokens)).write({"weights": float(tokens)})
    assert len(json.loads((tmp_path / "starts.json").read_text())) == 200
    assert StartTimes(config_of(tmp_path, max_tokens_per_forward=205)).read() == {"weights": 205.0}


def test_with_a_display_phases_go_there_and_not_to_the_log(tmp_path):
    file = ProgressFile(tmp_path / "worker-0.progress")
    file.path.touch()
    with capture_logs() as lines:
        progress = BootProgress(StartTimes(config_of(tmp_path)), file)
        with progress.phase("weights"):
            doing = file.read()
        progress.finish()
    assert (doing.what, doing.usual_s) == ("loading weights", None)
    assert file.read().what == READY
    assert [line["event"] for line in lines] == ["started"]


def test_a_worker_that_starts_again_behind_the_display_reports_to_the_log(tmp_path):
    file = ProgressFile(tmp_path / "worker-0.progress")
    with capture_logs() as lines, BootProgress(file=file).phase("weights"):
        pass
    assert [line["event"] for line in lines] == ["loading weights"]
    assert not file.path.exists()
