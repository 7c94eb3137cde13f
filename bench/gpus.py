"""The visible GPUs, as NVIDIA's management library (NVML) measures them. Needs the package ``nvidia-ml-py``."""

from typing import Any

from services.common.host.resources import gpu_names, visible_gpus


class Gpus:
    """A reader of the visible GPUs of this host. Figures count all programs on them."""

    def __init__(self, nvml: Any, names: list[str]) -> None:
        """``nvml`` is the module ``pynvml``. ``names`` are those of ``CUDA_VISIBLE_DEVICES``: indices or UUIDs."""
        self._nvml = nvml
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]

    @classmethod
    def visible(cls) -> "Gpus | None":
        """Return the reader, or None without a GPU, its driver or the package."""
        names = gpu_names(visible_gpus() or "")
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, names) if names else None
        except pynvml.NVMLError:
            return None

    def free_share(self) -> float:
        """Return the smallest share of free memory of a GPU."""
        memories = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        return min(round(1 - each.used / each.total, 4) for each in memories)

    def joules(self) -> float | None:
        """Return the energy of all GPUs since their driver was loaded, or None if one does not count it."""
        try:
            return 1e-3 * sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles)
        except self._nvml.NVMLError:
            return None


class EnergyMeter:
    """A measurement of the energy of the visible GPUs, which begins with this object."""

    def __init__(self, gpus: Gpus | None) -> None:
        """``gpus``: None if no energy can be measured."""
        self._gpus = gpus
        self._before = None if gpus is None else gpus.joules()

    def per_token(self, tokens: float) -> dict[str, float]:
        """Return ``joules_per_token`` of ``tokens`` so far, or nothing without a measurement or a token."""
        now = None if self._gpus is None else self._gpus.joules()
        if now is None or self._before is None or not tokens:
            return {}
        return {"joules_per_token": (now - self._before) / tokens}
