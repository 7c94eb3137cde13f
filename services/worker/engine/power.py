"""What the driver says of the energy that a GPU has used, through NVML, which comes with it."""

import ctypes
from contextlib import suppress

import torch


class Power:
    """One device's. Asked by one thread at a time; a question takes some microseconds."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def of(cls, device: torch.device) -> "Power | None":
        """None where there is no driver, or one that does not tell."""
        if device.type != "cuda":
            return None
        with suppress(OSError, AttributeError, RuntimeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = ctypes.c_void_p()
            if library.nvmlInit_v2() == 0:
                if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0:
                    return cls(library, handle)
                library.nvmlShutdown()
        return None

    def joules(self) -> float | None:
        """Since the driver was loaded, whoever used the device; None where it does not count."""
        millijoules = ctypes.c_ulonglong()
        status = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return millijoules.value * 1e-3 if status == 0 else None

    def watts(self) -> float | None:
        milliwatts = ctypes.c_uint()
        status = self._library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(milliwatts))
        return milliwatts.value * 1e-3 if status == 0 else None
