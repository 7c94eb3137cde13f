"""Arenas: tensors whose memory is given back and taken again at the same addresses."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from services.common.config import WorkerConfig
from services.common.errors import FailedPrecondition
from services.common.model.checkpoint_files import read_shards
from services.common.model.files import read_config
from services.worker.arena import host_copy
from services.worker.arena.cuda_block import AccessDescription, AllocationProperties
from services.worker.arena.host_copy import HostCopy
from services.worker.arena.tensor_arena import TensorArena
from services.worker.boot.common import boot
from services.worker.described.registry import read_model_config
from services.worker.models.received import ReceivedTensors

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
MIB = 1 << 20


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)


def used(tensor: torch.Tensor) -> int:
    """Return the bytes of memory in use: of the mapping of ``tensor`` on a CPU, or of its CUDA device."""
    if tensor.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(tensor.device)
        return total - free
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif here and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping has the address of the tensor")


def test_memory_is_given_back_and_taken_again_at_the_same_addresses(device):
    arena = TensorArena(device)
    one, other = arena.zeros((3, 4 * MIB), torch.bfloat16), arena.zeros((5, 7), torch.int32)
    assert (one.shape, one.dtype, other.shape, other.dtype) == ((3, 4 * MIB), torch.bfloat16, (5, 7), torch.int32)
    assert not one.any()
    assert not other.any()
    one.fill_(1)
    other.fill_(2)
    addresses, before = [one.data_ptr(), other.data_ptr()], used(one)
    for _ in range(2):
        arena.release()
        assert before - used(one) >= 24 * MIB
        arena.restore()
        assert not one.any()
        assert not other.any()
        one.fill_(3)
        assert one.float().mean() == 3
    assert [one.data_ptr(), other.data_ptr()] == addresses


def test_adopted_tensors_are_the_same_objects_with_the_same_values(device):
    torch.manual_seed(0)
    made = [torch.randn(3, 5), torch.randn(700).bfloat16(), torch.tensor(7), torch.empty(0, 4), torch.ones(1 << 20)]
    tensors = [torch.nn.Parameter(each.to(device), requires_grad=False) for each in made]
    arena = TensorArena(device)
    arena.adopt(tensors)
    copy = HostCopy(arena.contents)
    copy.read()
    for _ in range(2):
        assert all(torch.equal(tensor.cpu(), each) for tensor, each in zip(tensors, made, strict=True))
        assert all(tensor.data_ptr() % 512 == 0 for tensor in tensors)
        arena.release()
        arena.restore()
        copy.write()
    assert arena.nbytes == sum(-(-each.nbytes // 512) * 512 for each in made)


def test_large_tensors_do_not_share_a_block():
    arena = TensorArena(torch.device("cpu"))
    arena.adopt(torch.ones(300 * MIB // 4) for _ in range(2))
    assert [content.nbytes for content in arena.contents] == [300 * MIB] * 2


def test_a_tensor_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 2\] is not contiguous"):
        TensorArena(torch.device("cpu")).adopt([torch.ones(2, 3).t()])


def test_a_copy_that_does_not_fit_the_host_names_the_sizes(monkeypatch):
    monkeypatch.setattr(host_copy, "available_memory", lambda: 2**29)
    arena = TensorArena(torch.device("cpu"))
    arena.zeros((2**30,), torch.uint8)
    with pytest.raises(FailedPrecondition, match=r"1\.0 GiB of host memory, and 0\.5 GiB are free.*level 2"):
        HostCopy(arena.contents)


@pytest.fixture
def full_of_pinned(monkeypatch) -> None:
    """A host without free memory, before torch gives back the pinned memory that it keeps."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(True), raising=False)
    monkeypatch.setattr(host_copy, "available_memory", lambda: 2**40 if emptied else 0)


@pytest.mark.usefixtures("full_of_pinned")
@pytest.mark.parametrize("use", ["sleep", "stage", "receive"])
def test_pinned_memory_that_torch_keeps_is_free_for_weights(checkpoint, use):
    if use == "sleep":
        arena = TensorArena(torch.device("cpu"))
        arena.zeros((8,), torch.uint8)
        HostCopy(arena.contents)
        return
    described = read_model_config(read_config(checkpoint()))
    (shard,) = read_shards(checkpoint())
    if use == "receive":
        ReceivedTensors(shard.tensors.keys(), described).check(shard.tensors)
        return
    config = WorkerConfig(model=str(checkpoint()), device="cpu", kv_cache_num_tokens=1024, page_size=16)
    booted = boot(config)
    assert booted.loaded.source.stage(checkpoint(), booted.loaded.model).tensors
    booted.runner.close()


def test_structures_have_the_sizes_of_the_driver():
    assert (ctypes.sizeof(AllocationProperties), ctypes.sizeof(AccessDescription)) == (32, 12)


@pytest.mark.gpu
@needs_cuda
def test_a_device_without_memory_changes_nothing():
    device = torch.device("cuda", 0)
    arena = TensorArena(device)
    tensor = arena.zeros((1 << 30,), torch.uint8)
    other = arena.zeros((1 << 30,), torch.uint8)
    torch.cuda.empty_cache()
    arena.release()
    taken = torch.empty(torch.cuda.mem_get_info(device)[0] - (3 << 29), dtype=torch.uint8, device=device)
    before = used(tensor)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        arena.restore()
    assert used(tensor) == before
    del taken
    torch.cuda.empty_cache()
    arena.restore()
    assert not tensor.any()
    assert not other.any()


@pytest.mark.gpu
@needs_cuda
def test_memory_is_freed_with_the_last_tensor():
    device = torch.device("cuda", 0)
    small = torch.zeros(1, device=device)
    before, arena = used(small), TensorArena(device)
    view = arena.zeros((1 << 30,), torch.uint8)[5:10]
    del arena
    assert used(small) >= before + (1 << 30)
    del view
    assert used(small) == before


@pytest.mark.gpu
@needs_cuda
def test_a_graph_stays_valid():
    device = torch.device("cuda", 0)
    arena = TensorArena(device)
    matrix, result = arena.zeros((512, 512), torch.float32), torch.zeros(512, device=device)
    graph = torch.cuda.CUDAGraph()
    (matrix @ result)  # allocates the workspace of the library
    with torch.cuda.graph(graph):
        result.copy_(matrix.sum(dim=0))
    arena.release()
    torch.cuda.empty_cache()
    other = torch.full((1 << 28,), 9.0, device=device)
    arena.restore()
    matrix.fill_(2)
    graph.replay()
    assert result.tolist() == [1024.0] * 512
    assert other.mean() == 9
