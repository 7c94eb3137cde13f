"""A worker that takes ``BENCH_LOAD_SECONDS`` longer to load its model. ``bench.start`` runs it."""

import os
import time

from services.common.config import WorkerConfig
from services.common.process.service import Stop, run_service
from services.worker.boot.common import Booted, boot
from services.worker.boot.progress import BootProgress
from services.worker.server import serve

LOAD_SECONDS = "BENCH_LOAD_SECONDS"


async def _serve(config: WorkerConfig, stop: Stop) -> None:
    progress = BootProgress.of(config)

    def load() -> Booted:
        with progress.phase("weights"):
            time.sleep(float(os.environ[LOAD_SECONDS]))
        return boot(config, progress=progress)

    await serve(config, stop, load=load)


if __name__ == "__main__":
    run_service("worker", WorkerConfig, _serve)
