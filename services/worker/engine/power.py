"""The energy and power of a GPU, as NVIDIA's driver measures them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


class Power:
    """A reader of the energy and power of one device. Used by one thread at a time. A call takes some microseconds."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """``nvml`` is the module ``pynvml``; ``handle`` is its handle of the device."""
        self._nvml, self._handle = nvml, handle

    @classmethod
    def of(cls, device: torch.device) -> "Power | None":
        """Return the reader for ``device``, or None if there is no driver or the extra ``worker-cuda`` is missing."""
        if device.type != "cuda":
            return None
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError, AttributeError, RuntimeError):
                pynvml.nvmlInit()
                uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return None

    def joules(self) -> float | None:
        """Return the energy that the device has used since the driver was loaded, or None if it is not counted."""
        return self._read(self._nvml.nvmlDeviceGetTotalEnergyConsumption)

    def watts(self) -> float | None:
        """Return the power that the device draws, or None if it is not measured."""
        return self._read(self._nvml.nvmlDeviceGetPowerUsage)

    def _read(self, thousandths: Callable[[Any], int]) -> float | None:
        try:
            return thousandths(self._handle) * 1e-3
        except self._nvml.NVMLError:
            return None
