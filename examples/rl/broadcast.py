"""Broadcast of a trainer's weights: ``python broadcast.py SERVER CHECKPOINT``, with ``toka weight_directories=...``.

It sends a checkpoint once. A trainer keeps the group, and calls ``push`` after each of its steps.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import load_file

HOST, PORT, NAME = "127.0.0.1", 29511, "trainer"  # the host must be one that the workers can reach
BACKEND, DEVICE = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
TIMEOUT = timedelta(seconds=300)


def call(server: str, path: str, **body) -> dict:
    """Return the server's response. Raises ``RuntimeError`` with its error."""
    response = httpx.post(f"{server}{path}", json=body, timeout=None)
    if response.status_code != 200:
        raise RuntimeError(response.text)
    return response.json()


def join(server: str, threads: ThreadPoolExecutor):
    """Return a group of this process, which has rank 0, and all workers."""
    size = 1 + httpx.get(f"{server}/get_world_size").json()["world_size"]
    store = dist.TCPStore(HOST, PORT, size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    group = {"group_name": NAME, "backend": BACKEND, "world_size": size, "rank_offset": 1}
    joining = threads.submit(call, server, "/init_weights_update_group", master_address=HOST, master_port=PORT, **group)
    for prefix in (NAME, f"{NAME}/", f"{DEVICE}/"):
        store = dist.PrefixStore(prefix, store)
    made = (dist.ProcessGroupNCCL if BACKEND == "nccl" else dist.ProcessGroupGloo)(store, 0, size, timeout=TIMEOUT)
    joining.result()
    return made


def push(server: str, threads: ThreadPoolExecutor, group, tensors: dict[str, torch.Tensor], version: str) -> None:
    """Replace the server's weights by ``tensors``, which are by the names of the checkpoint."""
    described = {"names": list(tensors), "shapes": [list(each.shape) for each in tensors.values()]}
    described["dtypes"] = [str(each.dtype).removeprefix("torch.") for each in tensors.values()]
    receiving = threads.submit(
        call, server, "/update_weights_from_distributed", group_name=NAME, weight_version=version, **described
    )
    for tensor in tensors.values():
        content = tensor.detach().to(DEVICE).contiguous().reshape(-1).view(torch.uint8)
        group.broadcast([content], dist.BroadcastOptions()).wait()
    print(receiving.result()["message"])


if __name__ == "__main__":
    server, checkpoint = sys.argv[1:]
    tensors = {}
    for path in Path(checkpoint).glob("*.safetensors"):
        tensors |= load_file(path)
    with ThreadPoolExecutor() as threads:
        group = join(server, threads)
        push(server, threads, group, tensors, "step-1")
        call(server, "/destroy_weights_update_group", group_name=NAME)
