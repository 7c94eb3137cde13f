"""Checks of the CUDA driver, on which copies of shared weights rely: ``python -m tests.e2e.cuda_ipc_checks``.

It prints the name of each check before it runs, and its error, and exits with 1 if one fails. It needs a GPU. One check
needs two.
"""

import base64
import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from examples.rl.ipc import share
from services.common.errors import InvalidRequest
from services.worker.arena.cuda_driver import HANDLE_BYTES
from services.worker.arena.cuda_ipc import CudaGpu, SharedCopy, SharedMemory

COUNTS = 1000, 2**23  # elements of 8 bytes of the shared tensors
EXPANDABLE = "expandable_segments:True"


def content(count: int) -> torch.Tensor:
    return torch.arange(count) * 7 + count


def trainer(connection: Connection, device: str) -> None:
    """Share two tensors until the other end closes the connection."""
    tensors = [content(count).to(device) for count in COUNTS]
    torch.cuda.synchronize(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        places = [share(each) for each in tensors]
    except RuntimeError as error:
        connection.send(str(error))
        return
    connection.send([SharedCopy(base64.b64decode(each["handle"]), uuid, each["offset"]) for each in places])
    with contextlib.suppress(EOFError):
        connection.recv()
    del tensors


@contextlib.contextmanager
def allocator(settings: str) -> Iterator[None]:
    """Start processes whose torch allocates with ``settings``."""
    before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    try:
        yield
    finally:
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
        if before is not None:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = before


@contextlib.contextmanager
def shared(device: str = "cuda:0", *, expandable: bool = False) -> Iterator[list[SharedCopy]]:
    """Yield the places of the tensors of a process that shares them. Raises ``RuntimeError`` with its error."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=trainer, args=(other, device))
    with allocator(EXPANDABLE) if expandable else contextlib.nullcontext():
        process.start()
    other.close()
    try:
        found = own.recv()
        if isinstance(found, str):
            raise RuntimeError(found)
        yield found
    finally:
        own.close()
        process.join()


def copy(gpu: CudaGpu, places: list[SharedCopy]) -> None:
    """Copy the tensors in one call of a worker, and compare them."""
    with SharedMemory(gpu) as memory:
        for count, place in zip(COUNTS, places, strict=True):
            out = torch.empty(count, dtype=torch.int64, pin_memory=True)
            memory.copy_to_host(out, memory.locate([place], out.nbytes))
            assert torch.equal(out, content(count)), f"wrong values of {count} elements"


def refused(gpu: CudaGpu, place: SharedCopy, size: int = 8) -> str:
    """Return the error of a place that must not be used."""
    try:
        with SharedMemory(gpu) as memory:
            memory.locate([place], size)
    except InvalidRequest as error:
        return error.message
    raise AssertionError(f"{place} was opened")


def copies_are_equal_twice(gpu: CudaGpu) -> None:
    with shared() as places:
        copy(gpu, places)
        copy(gpu, places)  # the handles were closed


def a_thread_without_a_context_copies(gpu: CudaGpu) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            copy(gpu, places)
        except BaseException as error:
            errors.append(error)

    with shared() as places:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    if errors:
        raise errors[0]


def the_size_of_an_allocation_is_its_limit(gpu: CudaGpu) -> None:
    with shared() as places:
        assert "of an allocation of" in refused(gpu, places[1], 2**40)
        assert "of an allocation of" in refused(gpu, places[1]._replace(offset=2**64 - 8))
        copy(gpu, places)


def random_handles_are_refused(gpu: CudaGpu) -> None:
    for handle in (bytes(HANDLE_BYTES), b"\xff" * HANDLE_BYTES, *(os.urandom(HANDLE_BYTES) for _ in range(32))):
        refused(gpu, SharedCopy(handle, gpu.uuid, 0))
    with shared() as places:
        copy(gpu, places)


def changed_handles_do_no_harm(gpu: CudaGpu) -> None:
    """Flip each byte of a handle. The driver may ignore some bytes."""
    opened = []
    with shared() as places:
        handle = places[0].handle
        for at in range(HANDLE_BYTES):
            changed = handle[:at] + bytes([handle[at] ^ 0xFF]) + handle[at + 1 :]
            try:
                with SharedMemory(gpu) as memory:
                    memory.locate([places[0]._replace(handle=changed)], 8)
                opened.append(at)
            except InvalidRequest:
                pass
        print("  bytes that the driver ignores:", opened or "none")
        copy(gpu, places)


def memory_of_a_trainer_that_has_exited_is_refused(gpu: CudaGpu) -> None:
    with shared() as places:
        pass
    print(" ", refused(gpu, places[0]))


def a_copy_outlasts_the_trainer(gpu: CudaGpu) -> None:
    """Copy memory of a trainer that exits when its handle is open. CUDA's documentation does not promise this."""
    with SharedMemory(gpu) as memory:
        with shared() as places:
            address = memory.locate([places[0]], 8 * COUNTS[0])
        out = torch.empty(COUNTS[0], dtype=torch.int64, pin_memory=True)
        memory.copy_to_host(out, address)
        assert torch.equal(out, content(COUNTS[0])), "wrong values"


def expandable_segments_cannot_be_shared(gpu: CudaGpu) -> None:
    try:
        with shared(expandable=True):
            pass
    except RuntimeError as error:
        print(" ", error)
        return
    raise AssertionError("they were shared")


def memory_of_another_gpu_is_copied(gpu: CudaGpu) -> None:
    if torch.cuda.device_count() < 2:
        print("  skipped: needs two GPUs")
        return
    with shared("cuda:1") as places:
        copy(gpu, places)


def no_device_memory_is_lost(gpu: CudaGpu) -> None:
    """Other programs that allocate meanwhile change the figure, so it is only printed."""
    before = torch.cuda.mem_get_info(0)[0]
    for _ in range(3):
        with shared() as places:
            copy(gpu, places)
    print("  bytes less:", before - torch.cuda.mem_get_info(0)[0])


CHECKS: tuple[Callable[[CudaGpu], None], ...] = (
    copies_are_equal_twice,
    a_thread_without_a_context_copies,
    the_size_of_an_allocation_is_its_limit,
    random_handles_are_refused,
    changed_handles_do_no_harm,
    memory_of_a_trainer_that_has_exited_is_refused,
    expandable_segments_cannot_be_shared,
    memory_of_another_gpu_is_copied,
    no_device_memory_is_lost,
    a_copy_outlasts_the_trainer,  # the last one: if it fails, the device may be lost
)


def main() -> int:
    """Run all checks. Return the exit status."""
    gpu, failed = CudaGpu(torch.device("cuda", 0)), 0
    for check in CHECKS:
        print(check.__name__.replace("_", " "), flush=True)
        try:
            check(gpu)
        except Exception:  # a check may fail in any way, and the others run
            failed += 1
            print("  FAILED:", traceback.format_exc(), flush=True)
    print(f"{failed} of {len(CHECKS)} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
