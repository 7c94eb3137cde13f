"""Facts about this machine and the planned start that several checks use."""

import importlib.metadata
import importlib.util
import os
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from services.cli.doctor.nvml import Driver, GpuInfo, read_driver
from services.common.config import DeploymentConfig


@dataclass(frozen=True)
class Torch:
    """Installed build of torch, read without loading it."""

    version: str
    cuda: tuple[int, int] | None  # None for a CPU build


class Machine:
    """Machine and config of one run. Used by one thread.

    ``planned_gpu`` is the memory in bytes of the GPUs for which the start is planned. None means the GPUs of this
    machine.
    """

    def __init__(self, config: DeploymentConfig, planned_gpu: int | None = None) -> None:
        self.config, self.planned_gpu = config, planned_gpu
        self.ranks = config.tp_size * config.pp_size
        self.workers = config.dp_size * self.ranks

    @cached_property
    def driver(self) -> Driver:
        return read_driver()

    @cached_property
    def torch(self) -> Torch | None:
        """The installed torch, or None."""
        return installed_torch()

    @property
    def visible(self) -> str | None:
        """The value of ``CUDA_VISIBLE_DEVICES``, or all GPUs."""
        here = ",".join(str(gpu.index) for gpu in self.driver.gpus)
        return os.environ.get("CUDA_VISIBLE_DEVICES", here)

    @property
    def gpus(self) -> list[GpuInfo]:
        """The visible GPUs, in the order of ``visible``."""
        if self.planned_gpu is not None:
            planned = GpuInfo(0, "", "a GPU", self.planned_gpu, self.planned_gpu, (9, 0))
            return [replace(planned, index=index) for index in range(self.workers)]
        return visible_of(self.driver.gpus, self.visible)

    @property
    def has_mig_instances(self) -> bool:
        """True if MIG instances of GPUs are visible. Their sizes are not read."""
        return "MIG-" in (self.visible or "")

    @cached_property
    def on_cuda(self) -> bool:
        """True if the workers would run on GPUs."""
        if self.config.device != "auto" or self.planned_gpu is not None:
            return self.config.device != "cpu"
        there = bool(self.gpus) or self.has_mig_instances
        return there and (self.torch is None or self.torch.cuda is not None)


def visible_of(gpus: Sequence[GpuInfo], visible: str | None) -> list[GpuInfo]:
    """Return the GPUs that ``visible`` names by number or by the beginning of a UUID.

    As in CUDA, an unknown name hides all names after it.
    """
    if visible is None:
        return list(gpus)
    found: list[GpuInfo] = []
    for name in filter(None, (each.strip() for each in visible.split(","))):
        match = [gpu for gpu in gpus if str(gpu.index) == name or (not name.isdigit() and gpu.uuid.startswith(name))]
        if len(match) != 1:
            break
        found += match
    return found


def installed_torch() -> Torch | None:
    """Read the build of torch from its files, since loading torch takes seconds and may fail."""
    if (version := installed("torch")) is None:
        return None
    spec = importlib.util.find_spec("torch")
    places = list(spec.submodule_search_locations or ()) if spec else []
    facts: dict[str, object] = {}
    if places and (path := Path(places[0]) / "version.py").is_file():
        facts = runpy.run_path(str(path))
    cuda = facts.get("cuda")
    if not isinstance(cuda, str):
        return Torch(version, None)
    major, _, minor = cuda.partition(".")
    return Torch(version, (int(major), int(minor.partition(".")[0] or 0)))


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
