"""What a request costs its key that did not come to its end."""

import time

import numpy as np
import pytest

from services.common.errors import DeadlineExceeded, TokaError, Unavailable
from services.common.keys import Key
from services.common.limits import DEFAULT_ANSWER_TOKENS, KeyLimits
from services.gateway.engine import codec
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.failover import Failover
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.http.bounds import Bounds
from services.gateway.http.request import Caller
from tests.gateway.scheduler_end import SchedulerEnd, finish
from tokasaurus.scheduler.v1 import generate_pb2

RATE, PROMPT = 10_000, 7
KEY = Key("thrifty", frozenset(), tokens_per_minute=RATE)


class Running:
    """A request of two samples whose length nobody said, at a scheduler."""

    def __init__(self, *, streaming: bool, timeout_s: float | None = None) -> None:
        self.limits = KeyLimits(clock=lambda: 0.0)
        deadline_ms = None if timeout_s is None else int((time.monotonic() + timeout_s) * 1000)
        settings = Settings(n=2, open_ended=True, deadline_ms=deadline_ms)
        jobs = [PromptRequest("r", "m", np.zeros(PROMPT, np.uint32), 5000, None, settings)]
        self.bounds = Bounds(self.limits, Caller("", "", key=KEY), jobs)
        self.generation = ActiveRequest(jobs, streaming=streaming)
        self.bounds.begin(self.generation)
        self.scheduler = SchedulerEnd()
        self.scheduler.session.submit(self.generation.scheduler_requests[0])

    async def tokens(self, *counts: int, first: int = 0, endings: dict[int, generate_pb2.Finish] | None = None) -> None:
        """So many more come of each sample, from the handle ``first`` on."""
        handles, ids = range(first, first + len(counts)), [1] * sum(counts)
        await self.scheduler.outputs(handles=handles, token_counts=counts, token_ids=ids, finished=endings)

    @property
    def cost(self) -> int:
        """Of the request, when it is settled and closed."""
        self.bounds.settle(self.generation)
        self.generation.close()
        return RATE - int(self.limits.headers(KEY)["x-ratelimit-remaining-tokens"])


def ending(completion_tokens: int, error: TokaError | None = None) -> generate_pb2.Finish:
    return finish(completion_tokens, PROMPT, error)


@pytest.mark.parametrize("streaming", [True, False])
class TestARequest:
    async def test_that_its_client_leaves_costs_what_came_of_it(self, streaming):
        running = Running(streaming=streaming)
        await running.tokens(1500, 1400)
        for choice in running.generation.samples:
            choice.take()  # told, and not here any more
        await running.tokens(100, 200)
        assert running.cost == PROMPT + 3200

    async def test_that_its_client_leaves_early_costs_what_was_set_aside(self, streaming):
        running = Running(streaming=streaming)
        await running.tokens(5, 5)
        assert running.cost == PROMPT + 2 * DEFAULT_ANSWER_TOKENS

    async def test_of_which_one_sample_is_through_costs_what_came_of_both(self, streaming):
        running = Running(streaming=streaming)
        await running.tokens(1500, 1600, endings={0: ending(1500)})
        await running.tokens(100, first=1)
        assert running.cost == PROMPT + 3200

    async def test_that_is_through_costs_what_was_made(self, streaming):
        running = Running(streaming=streaming)
        await running.tokens(5, 6, endings={0: ending(5), 1: ending(6)})
        assert running.cost == PROMPT + 11

    async def test_that_its_scheduler_ends_for_its_timeout_costs_what_came_of_it(self, streaming):
        running = Running(streaming=streaming, timeout_s=60)
        await running.tokens(1500, 1600)
        late = DeadlineExceeded("late")
        await running.tokens(50, 50, endings={0: ending(1550, late), 1: ending(1650, late)})
        assert running.cost == PROMPT + 3200

    async def test_that_the_gateway_ends_for_its_timeout_costs_what_came_of_it(self, streaming):
        running = Running(streaming=streaming, timeout_s=60)
        await running.tokens(1500, 1700)
        running.generation.fail(DeadlineExceeded("late"))
        assert running.cost == PROMPT + 3200

    async def test_that_goes_on_elsewhere_costs_what_came_of_it_in_both_places(self, streaming):
        running = Running(streaming=streaming, timeout_s=60)
        await running.tokens(1500, 1500)
        failover = Failover(lambda *_: None, RequestMetrics(), 60.0)
        failover.lose(running.scheduler.session.abandon(), Unavailable("lost"), "lost")
        assert running.generation.generated_tokens == 3000
        running.scheduler = SchedulerEnd()
        for call in running.generation.scheduler_requests:
            running.scheduler.session.submit(call)
        await running.tokens(100, 60, endings={0: ending(1600, DeadlineExceeded("late"))})
        assert running.cost == PROMPT + 3160


@pytest.mark.parametrize("by_s", [7200, -7200])
async def test_a_wall_clock_that_is_set_moves_no_deadline(by_s, monkeypatch):
    caller = Caller("", "", asked_at=time.monotonic())
    shown = time.time() + by_s
    monkeypatch.setattr(time, "time", lambda: shown)
    settings = Settings(deadline_ms=caller.deadline_ms(3600.0))
    job = PromptRequest("r", "m", np.zeros(PROMPT, np.uint32), 5000, None, settings)
    generation = ActiveRequest([job], streaming=False)
    Bounds(KeyLimits(), caller, [job]).begin(generation)  # not overdue
    request = codec.encode_submit(generation.scheduler_requests[0].submission).submit.request
    assert 3_500_000 < request.deadline_in_ms <= 3_600_000
    generation.close()
