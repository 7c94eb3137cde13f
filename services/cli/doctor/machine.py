"""What the doctor knows of this machine before it looks at single things, and of the start that is meant."""

import importlib.metadata
import importlib.util
import os
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from services.cli.doctor.nvml import Driver, Gpu, read_driver
from services.common.config import DeploymentConfig


@dataclass(frozen=True)
class Torch:
    """The build that is installed, without loading it."""

    version: str
    cuda: tuple[int, int] | None  # None: it is for CPUs


class Machine:
    """Of one run of the command, in its only thread. ``planned_gpu``: bytes of the GPUs that the start is planned for;
    None = those that are here."""

    def __init__(self, config: DeploymentConfig, planned_gpu: int | None = None) -> None:
        self.config, self.planned_gpu = config, planned_gpu
        self.ranks = config.tp_size * config.pp_size
        self.workers = config.dp_size * self.ranks

    @cached_property
    def driver(self) -> Driver:
        return read_driver()

    @cached_property
    def torch(self) -> Torch | None:
        """None = it is not installed."""
        return installed_torch()

    @property
    def visible(self) -> str | None:
        """The GPUs as ``CUDA_VISIBLE_DEVICES`` lists them."""
        here = ",".join(str(gpu.index) for gpu in self.driver.gpus)
        return os.environ.get("CUDA_VISIBLE_DEVICES", here)

    @property
    def gpus(self) -> list[Gpu]:
        """Those that can be seen, in that order."""
        if self.planned_gpu is not None:
            planned = Gpu(0, "", "a GPU", self.planned_gpu, self.planned_gpu, (9, 0))
            return [replace(planned, index=index) for index in range(self.workers)]
        return seen(self.driver.gpus, self.visible)

    @property
    def has_shares(self) -> bool:
        """Whether what can be seen are parts of GPUs, whose sizes are not asked for."""
        return "MIG-" in (self.visible or "")

    @cached_property
    def on_cuda(self) -> bool:
        """Whether the workers would run on GPUs."""
        if self.config.device != "auto" or self.planned_gpu is not None:
            return self.config.device != "cpu"
        there = bool(self.gpus) or self.has_shares
        return there and (self.torch is None or self.torch.cuda is not None)


def seen(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Those of ``gpus`` that ``visible`` names, by number or by (the beginning of) a UUID. As CUDA does, what comes
    after a name of none is not seen."""
    if visible is None:
        return list(gpus)
    found: list[Gpu] = []
    for name in filter(None, (each.strip() for each in visible.split(","))):
        match = [gpu for gpu in gpus if str(gpu.index) == name or (not name.isdigit() and gpu.uuid.startswith(name))]
        if len(match) != 1:
            break
        found += match
    return found


def installed_torch() -> Torch | None:
    """From its files: loading it takes seconds, and may be what does not work."""
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
    """Its version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
