"""Detects the memory, the processors and the GPUs that this process may use.

On Linux, the limits of the container count (control groups, versions 1 and 2). On other systems, the values are those
of the whole machine.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes of memory that new programs can use on this host, or in its container if that is less."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    [kib] = [line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    free = int(kib) * 1024
    for group in _groups("memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free = min(free, limit - used + _reclaimable(group / "memory.stat"))
    return max(0, free)


def usable_processors() -> int:
    """Return the number of processors that this process may run on, limited by the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for group in _groups("cpu"):
        quota, period = _quota(group)
        if quota is not None and quota > 0 and period:
            count = min(count, math.ceil(quota / period))
    return max(1, count)


def visible_gpus() -> str | None:
    """Return the GPUs as a value of ``CUDA_VISIBLE_DEVICES``, or None if there is no GPU.

    If the variable is set, return its value. Otherwise return all GPUs that have a device file of NVIDIA's driver.
    """
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))) or None)


def has_gpus() -> bool:
    """Return whether an NVIDIA GPU is probably visible. A certain result needs torch, which takes seconds to load."""
    return bool(gpu_names(visible_gpus() or ""))


def gpu_names(visible: str) -> list[str]:
    """Return the GPUs that ``visible``, a value of ``CUDA_VISIBLE_DEVICES``, names. An empty name and -1 are none."""
    return [name for name in visible.split(",") if name not in ("", "-1")]


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups that may limit ``controller``, up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        inside = Path(path.lstrip("/"))
        for each in (inside, *inside.parents):
            yield root / each


def _quota(group: Path) -> tuple[int | None, int | None]:
    """Return the processor time per period, or None without a limit, and the length of the period, in microseconds."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return (None if quota == "max" else int(quota)), int(period)
    except (OSError, ValueError):
        return _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the file is missing, or contains "max"
        return None


def _reclaimable(stat: Path) -> int:
    """Return the bytes of cached files that the kernel frees when programs need memory."""
    try:
        fields = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        return int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0
