"""``toka-worker flag=value ...``"""

import asyncio
import os

from services.common.config import WorkerConfig
from services.common.process import run_service


def main() -> None:
    """Run one worker until it is told to stop."""
    # Read when torch is loaded. Its idle threads must not spin: other processes need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Weights in huge pages: every step reads all of them.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    run_service("worker", WorkerConfig, _serve)


async def _serve(config: WorkerConfig, stop: asyncio.Event) -> None:
    from services.worker.server import serve  # loads torch

    await serve(config, stop)


if __name__ == "__main__":
    main()
