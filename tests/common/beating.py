"""A service that does nothing but beat, in a manner, for ``test_watchdog`` and ``test_process``. It tells each beat on
stdout.

Manners: "calm"; "stuck" = there is work and no progress; "blocked" = its event loop stops turning; "slow" = the loop is
blocked for longer than ``step_deadline``, but before it serves; "clinging" = it does not end.
"""

import asyncio
import time

from services.common.config import ServiceConfig
from services.common.process import Stop, run_service
from services.common.pulse import Pulse


class BeatingConfig(ServiceConfig):
    manner: str = "calm"


async def serve(config: BeatingConfig, stop: Stop) -> None:
    def progresses() -> bool:
        print("beat", flush=True)
        return config.manner != "stuck"

    async with Pulse(config, "work") as pulse:
        if config.manner == "slow":
            time.sleep(1.5 * config.step_deadline)  # noqa: ASYNC251 (that is the point)
        pulse.serving(progresses)
        print("serving", flush=True)
        if config.manner == "blocked":
            time.sleep(60)  # noqa: ASYNC251
        await stop.wait()
        print("stopping", flush=True)
        if config.manner == "clinging":
            await asyncio.Event().wait()


if __name__ == "__main__":
    run_service("beating", BeatingConfig, serve)
