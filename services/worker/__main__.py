"""Entry point of ``toka-worker flag=value ...``."""

import gc
import os
from collections.abc import Callable, Coroutine
from typing import Any

from services.common.config import WorkerConfig
from services.common.process.service import Stop, exit_now, run_service, run_unless_stopped
from services.common.process.watchdog_client import WatchdogClient
from services.worker.boot.caches import keep_compiled_code_in
from services.worker.boot.precompile.background import KernelCompiler, can_precompile
from services.worker.boot.progress import BootProgress
from services.worker.described.refusals import refuse_numba_settings

# A boot may compile for minutes without releasing the interpreter, and wait half an hour for other ranks.
BOOT_S = 1800.0


def main() -> None:
    """Run one worker until it is stopped."""
    # torch reads these variables when it is loaded.
    # Its idle threads must not spin, because other processes need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Keep weights in huge pages, because every step reads all of them.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Otherwise steps of different sizes fragment the memory of the device.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Messages to other ranks must not queue behind the kernels of the model.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    run_service("worker", WorkerConfig, _serve)


async def _serve(config: WorkerConfig, stop: Stop) -> None:
    async with WatchdogClient(config, "compute thread", BOOT_S) as watchdog:
        progress = BootProgress.of(config)
        compiler = KernelCompiler.start() if progress.first_start and can_precompile(config) else None
        with progress.phase("imports"):
            # Load in a thread, because a signal must not wait until torch is loaded.
            serve = await run_unless_stopped(lambda: _load_libraries(config), stop)
        if serve is None:
            exit_now(0)  # the thread cannot be interrupted, and the interpreter would wait for it
        await serve(config, stop, on_serving=watchdog.serving, progress=progress, compiler=compiler)


def _load_libraries(config: WorkerConfig) -> Callable[..., Coroutine[Any, Any, None]]:
    """Load torch and its compilers. Return ``services.worker.server.serve``. Raises ``InvalidRequest``."""
    refuse_numba_settings()
    gc.disable()  # imports create a million objects and few cycles
    try:
        if _compiles(config):
            keep_compiled_code_in(config.compile_cache_dir)
        from services.worker.server import serve
    finally:
        gc.enable()
    gc.freeze()  # later collections skip the modules
    return serve


def _compiles(config: WorkerConfig) -> bool:
    """Return whether the worker keeps compiled code in ``compile_cache_dir``.

    Numba, on CPUs, needs no directory, so that such a worker also runs without a home directory. A directory that the
    operator set is always checked.
    """
    if (
        config.torch_compile is True
        or config.compile_cache_dir != WorkerConfig.model_fields["compile_cache_dir"].default
    ):
        return True
    if config.device != "auto":
        return config.device == "cuda"
    import torch  # the compilers read their cache directories later

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
