"""Weights shared by CUDA IPC: ``python ipc.py SERVER CHECKPOINT``, on the host of ``toka weight_directories=...``.

It shares a checkpoint once. A trainer calls ``push`` after each of its steps.
"""

import base64
import ctypes
import sys
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t


def call(server: str, path: str, **body) -> dict:
    """Return the server's response. Raises ``RuntimeError`` with its error."""
    response = httpx.post(f"{server}{path}", json=body, timeout=None)
    if response.status_code != 200:
        raise RuntimeError(response.text)
    return response.json()


def share(tensor: torch.Tensor) -> dict:
    """Return the handle of the allocation of a contiguous CUDA tensor, and its offset there. Raises ``RuntimeError``.

    torch puts several tensors into one allocation, and workers open each allocation once.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_ubyte * HANDLE_BYTES)()
    address = ctypes.c_uint64(tensor.data_ptr())
    code = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
    if code := code or cuda.cuIpcGetMemHandle(ctypes.byref(handle), base):
        raise RuntimeError(f"CUDA error {code}: this memory cannot be shared; set expandable_segments:False in torch")
    return {"handle": base64.b64encode(bytes(handle)).decode(), "offset": address.value - base.value}


def push(server: str, tensors: dict[str, torch.Tensor], version: str) -> None:
    """Replace the server's weights by contiguous CUDA ``tensors`` of one GPU, by the names of the checkpoint."""
    info = {"names": list(tensors), "shapes": [list(each.shape) for each in tensors.values()]}
    info["dtype_names"] = [str(each.dtype).removeprefix("torch.") for each in tensors.values()]
    gpu = str(torch.cuda.get_device_properties(next(iter(tensors.values())).device).uuid)
    info["ipc_handles"] = [{gpu: share(each)} for each in tensors.values()]
    torch.cuda.synchronize()  # the workers read the memory at once
    call(server, "/start_weight_update", backend="ipc")
    call(server, "/update_weights", update_info=info)  # later, the tensors may change
    print(call(server, "/finish_weight_update", weight_version=version))


if __name__ == "__main__":
    server, checkpoint = sys.argv[1:]
    tensors = {}
    for path in Path(checkpoint).glob("*.safetensors"):
        tensors |= load_file(path, device="cuda")
    push(server, tensors, Path(checkpoint).name)
