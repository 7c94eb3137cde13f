"""Memory and processors in containers, by files as the kernel writes them."""

import os
from pathlib import Path

import pytest

from services.common.host import resources as host

GIB = 2**30


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Lay out control groups in a directory of this test. The argument: lines of /proc/self/cgroup, and files."""
    read = Path.read_text

    def lay_out(own: str, files: dict[str, str]) -> None:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)

        def read_text(path: Path, *arguments, **options) -> str:
            answers = {"/proc/self/cgroup": own, "/proc/meminfo": f"MemTotal: 1\nMemAvailable: {64 * 2**20} kB\n"}
            return answers.get(str(path)) or read(path, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(host, "_CGROUPS", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)

    return lay_out


def test_without_limits_the_host_counts(container):
    container("0::/user.slice\n", {"user.slice/memory.max": "max", "user.slice/cpu.max": "max 100000"})
    assert host.available_memory() == 64 * GIB
    assert host.usable_processors() == 16


def test_a_limit_of_an_outer_group_counts_and_cached_files_do_not(container):
    outer = {"a/memory.max": str(8 * GIB), "a/memory.current": str(5 * GIB), "a/memory.stat": f"inactive_file {GIB}\n"}
    container("0::/a/b\n", outer | {"a/b/memory.max": "max", "a/b/cpu.max": "250000 100000"})
    assert host.available_memory() == 4 * GIB
    assert host.usable_processors() == 3


def test_control_groups_of_version_1_count(container):
    files = {
        "memory/docker/x/memory.limit_in_bytes": str(2 * GIB),
        "memory/docker/x/memory.usage_in_bytes": str(GIB),
        "cpu/docker/x/cpu.cfs_quota_us": "200000",
        "cpu/docker/x/cpu.cfs_period_us": "100000",
    }
    container("5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n", files)
    assert host.available_memory() == GIB
    assert host.usable_processors() == 2
