"""What NVIDIA's driver says of its GPUs, through NVML, which comes with it. Run as a program it prints JSON: a driver
that hangs or crashes takes a child with it, and not who asks (``read_driver``)."""

import ctypes
import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from typing import Any

from services.common.process.children import module_command, module_environment

_LIBRARY = "libnvidia-ml.so.1"
_PATIENCE_S = 60.0
_P2P_READ, _P2P_NVLINK = 0, 2
_TEXT = 96


@dataclass(frozen=True)
class Gpu:
    """One device. Bytes."""

    index: int
    uuid: str
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    peers: tuple[int, ...] = ()  # indices of those whose memory it can read
    nvlinks: tuple[int, ...] = ()  # of these, over NVLink


@dataclass(frozen=True)
class Driver:
    """All that was asked. ``trouble``: why nothing more is known."""

    trouble: str = ""
    version: str = ""
    cuda: tuple[int, int] = (0, 0)  # the latest version that it takes
    gpus: tuple[Gpu, ...] = field(default_factory=tuple)


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class NvmlError(Exception):
    """A call failed."""


def read_driver() -> Driver:
    """Asks a child."""
    command, environment = module_command(__spec__.name), module_environment(os.environ)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Driver(f"NVIDIA's driver did not answer within {_PATIENCE_S:.0f} s")
    if done.returncode:
        return Driver(f"asking NVIDIA's driver ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return _read(json.loads(done.stdout))


def _read(told: dict[str, Any]) -> Driver:
    """JSON has no tuples."""
    gpus: list[Any] = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in gpu.items()}
        for gpu in told["gpus"]
    ]
    major, minor = told["cuda"]
    return Driver(told["trouble"], told["version"], (major, minor), tuple(Gpu(**gpu) for gpu in gpus))


def ask() -> Driver:
    """Asks in this process."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return Driver(f"no NVIDIA driver here ({_LIBRARY} cannot be loaded)")
    try:
        _call(library, "nvmlInit_v2")
        return Driver("", _text(library, "nvmlSystemGetDriverVersion"), _cuda(library), _gpus(library))
    except (NvmlError, AttributeError) as error:
        return Driver(f"NVIDIA's driver does not answer: {error}")


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        library.nvmlErrorString.restype = ctypes.c_char_p
        raise NvmlError(f"{name}: {(library.nvmlErrorString(status) or b'').decode()} ({status})")


def _text(library: ctypes.CDLL, name: str, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _call(library, name, *arguments, buffer, _TEXT)
    return buffer.value.decode()


def _numbers(library: ctypes.CDLL, name: str, *arguments: Any, count: int = 1) -> list[int]:
    numbers = [ctypes.c_int() for _ in range(count)]
    _call(library, name, *arguments, *map(ctypes.byref, numbers))
    return [number.value for number in numbers]


def _cuda(library: ctypes.CDLL) -> tuple[int, int]:
    [version] = _numbers(library, "nvmlSystemGetCudaDriverVersion_v2")
    return version // 1000, version % 1000 // 10


def _gpus(library: ctypes.CDLL) -> tuple[Gpu, ...]:
    handles = []
    for index in range(_numbers(library, "nvmlDeviceGetCount_v2")[0]):
        handles.append(ctypes.c_void_p())
        _call(library, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handles[-1]))

    found = []
    for index, handle in enumerate(handles):
        memory = _Memory()
        _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        major, minor = _numbers(library, "nvmlDeviceGetCudaComputeCapability", handle, count=2)
        uuid, name = (_text(library, f"nvmlDeviceGet{what}", handle) for what in ("UUID", "Name"))
        peers, linked = (
            tuple(
                other
                for other in range(len(handles))
                if other != index and _reach(library, handle, handles[other], how)
            )
            for how in (_P2P_READ, _P2P_NVLINK)
        )
        found.append(Gpu(index, uuid, name, memory.total, memory.free, (major, minor), peers, linked))
    return tuple(found)


def _reach(library: ctypes.CDLL, one: ctypes.c_void_p, other: ctypes.c_void_p, how: int) -> bool:
    """Whether one has the other's memory, in this way; not where the driver does not tell."""
    try:
        return _numbers(library, "nvmlDeviceGetP2PStatus", one, other, how) == [0]
    except NvmlError:
        return False


if __name__ == "__main__":
    print(json.dumps(asdict(ask())))
