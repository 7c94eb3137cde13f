"""A service that does nothing but beat, in a manner, for ``test_watchdog`` and others. It tells each beat on stdout.

Manners: "calm"; "stuck" = there is work and no progress; "blocked" = its event loop stops turning; "slow" = the loop is
blocked for longer than ``step_deadline``, but before it serves; "clinging" = it does not end; "wordy" = it logs
``LINES`` lines before it serves; "failing", "refusing", "aborting" = it logs a line and dies of an error, of one with a
reason, or of a signal.
"""

import asyncio
import os
import time

import structlog

from services.common.config import ServiceFlags
from services.common.errors import Unavailable
from services.common.process.service import Stop, run_service
from services.common.process.watchdog_client import WatchdogClient

LINES = 6_000  # of some 200 bytes each

log = structlog.get_logger(__name__)


class BeatingConfig(ServiceFlags):
    manner: str = "calm"


async def serve(config: BeatingConfig, stop: Stop) -> None:
    def progresses() -> bool:
        print("beat", flush=True)
        return config.manner != "stuck"

    async with WatchdogClient(config, "work") as watchdog:
        if config.manner == "slow":
            time.sleep(1.5 * config.step_deadline)  # noqa: ASYNC251 (that is the point)
        for number in range(LINES if config.manner == "wordy" else 0):
            log.info("said", number=number, filling="." * 100)
        watchdog.serving(progresses)
        print("serving", flush=True)
        log.info("last words")
        match config.manner:
            case "failing":
                raise RuntimeError("of this it dies")
            case "refusing":
                raise Unavailable("of this it dies")
            case "aborting":
                os.abort()
        if config.manner == "blocked":
            time.sleep(60)  # noqa: ASYNC251
        await stop.wait()
        print("stopping", flush=True)
        if config.manner == "clinging":
            await asyncio.Event().wait()


if __name__ == "__main__":
    run_service("beating", BeatingConfig, serve)
