"""Reads the facts about GPUs from NVIDIA's driver, through NVML.

Run as a program, this module prints the facts as JSON. ``read_driver`` runs it as a child process, so that a driver
that hangs or crashes does not take its caller with it.
"""

import os
import subprocess
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from services.common.process.children import module_command, module_environment

_TIMEOUT_S = 60.0
_P2P_READ, _P2P_NVLINK = 0, 2  # pynvml defines the first as a tuple, which its own function refuses


@dataclass(frozen=True)
class GpuInfo:
    """A device. Sizes are in bytes."""

    index: int
    uuid: str
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    peers: tuple[int, ...] = ()  # indices of the devices whose memory it can read
    nvlinks: tuple[int, ...] = ()  # those of them that it reaches over NVLink


@dataclass(frozen=True)
class Driver:
    """The facts about the driver and its devices. ``trouble`` says why no more facts are known."""

    trouble: str = ""
    version: str = ""
    cuda: tuple[int, int] = (0, 0)  # the latest CUDA version that it supports
    gpus: tuple[GpuInfo, ...] = ()


_DRIVER = TypeAdapter(Driver)


def read_driver() -> Driver:
    """Return the facts, read by a child process."""
    command, environment = module_command(__spec__.name), module_environment(os.environ)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Driver(f"NVIDIA's driver did not answer within {_TIMEOUT_S:.0f} s")
    if done.returncode:
        return Driver(f"asking NVIDIA's driver ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return _DRIVER.validate_json(done.stdout)


def ask() -> Driver:
    """Return the facts, read in this process."""
    import pynvml as nvml  # by the child alone

    try:
        nvml.nvmlInit()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Driver("", nvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10), _gpus(nvml))
    except nvml.NVMLError_LibraryNotFound:
        return Driver("no NVIDIA driver here (libnvidia-ml.so.1 cannot be loaded)")
    except nvml.NVMLError as error:
        return Driver(f"NVIDIA's driver does not answer: {error}")


def _gpus(nvml: Any) -> tuple[GpuInfo, ...]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def reached(index: int, how: int) -> tuple[int, ...]:
        others = (other for other in range(len(handles)) if other != index)
        return tuple(other for other in others if _reaches(nvml, handles[index], handles[other], how))

    found = []
    for index, handle in enumerate(handles):
        memory, capability = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetCudaComputeCapability(handle)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        links = reached(index, _P2P_READ), reached(index, _P2P_NVLINK)
        found.append(GpuInfo(index, uuid, name, memory.total, memory.free, tuple(capability), *links))
    return tuple(found)


def _reaches(nvml: Any, one: Any, other: Any, how: int) -> bool:
    """Return whether ``one`` reaches the memory of ``other`` in this way; False if the driver cannot say."""
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(one, other, how) == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return False


if __name__ == "__main__":
    print(_DRIVER.dump_json(ask()).decode())
