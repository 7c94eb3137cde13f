"""A request that schedulers die of is found out, and costs nobody else an answer."""

import asyncio

import numpy as np
import pytest

from services.common.errors import Internal
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.http.errors import to_response
from tests.gateway.replicas import Engines
from tests.gateway.test_lost_schedulers import PROMPT, ends, first_tokens, fleet_of, some
from tests.gateway.test_lost_schedulers import fingerprint as fingerprint

POISON = 9


@pytest.mark.timeout(400)
@pytest.mark.slow
async def test_a_request_that_schedulers_die_of_ends_and_nobody_else(tmp_path, fingerprint):
    engines = Engines(tmp_path, 2, program="tests.fakes.scheduler", worker={"step_ms": 10}, poison=POISON)

    async def supervise() -> None:
        while True:
            for scheduler in engines.schedulers:
                if not scheduler.running:
                    scheduler.start()
            await asyncio.sleep(0.05)

    async with fleet_of(engines, fingerprint) as fleet:
        supervisor = asyncio.create_task(supervise())
        try:
            running = await some(fleet, 8, tokens=100)
            await first_tokens(running)
            prompt = np.array([POISON, *PROMPT], np.uint32)
            job = PromptRequest("p", "tokasaurus-builtin", prompt, 10, 1, Settings(n=2))
            poison = await fleet.generate([job], streaming=False)
            running += await some(fleet, 4)
            with pytest.raises(Internal, match="3 of them with no other suspect") as caught:
                async with asyncio.timeout(240):
                    await poison.wait_ended()
            poison.close()
            assert to_response(caught.value).headers["x-should-retry"] == "false"
            await ends(running)
        finally:
            supervisor.cancel()
