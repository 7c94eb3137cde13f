"""What a request's choices hold while their tokens come in."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from services.common.errors import Unavailable
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.codec import SampleEnding, TokenLogprob
from services.gateway.engine.request import PromptRequest, Settings
from tests.gateway.scheduler_end import SchedulerEnd


def generation(*, n: int = 1, streaming: bool = True, logprobs: bool = False) -> ActiveRequest:
    job = PromptRequest("r", "m", np.array([1], dtype=np.uint32), 5, None, Settings(n=n, logprobs=logprobs))
    return ActiveRequest([job], streaming=streaming)


def ending(*, at_stop_token: bool = False) -> SampleEnding:
    return SampleEnding("stop", at_stop_token, 0, 1, 1, 0, 0.0, 0.0, 0.0, None)


def test_entries_of_those_who_did_not_ask_for_logprobs_are_dropped():
    running = generation()
    [choice] = running.samples
    running.add_tokens(choice, [5], [None])
    running.add_tokens(choice, [6], None)
    assert choice.take() == ([5, 6], [])


def test_logprobs_stay_beside_their_tokens():
    running, entry = generation(logprobs=True), TokenLogprob(-1.0, [], [])
    [choice] = running.samples
    running.add_tokens(choice, [5, 6], [entry, entry])
    running.finish(choice, ending(at_stop_token=True))
    assert choice.take() == ([5], [entry])


async def test_a_stream_hears_of_every_choice_once_and_then_of_the_end():
    running = generation(n=2)
    first, second = running.samples
    running.add_tokens(first, [5], None)
    running.add_tokens(first, [6], None)
    running.add_tokens(second, [7], None)
    assert await running.wait_updated() == [first, second]
    running.finish(first, ending())
    running.finish(second, ending())
    assert await running.wait_updated() == [first, second]
    assert await running.wait_updated() == []


async def test_what_came_before_a_failure_is_told_before_it():
    running = generation()
    [choice] = running.samples
    running.add_tokens(choice, [5], None)
    running.fail(Unavailable("lost"))
    assert await running.wait_updated() == [choice]
    with pytest.raises(Unavailable):
        await running.wait_updated()


async def test_who_does_not_stream_hears_of_many_endings_at_once_and_of_the_last_ones():
    running = generation(n=70, streaming=False)
    for choice in running.samples[:40]:
        running.finish(choice, ending())
    assert await running.wait_ended() == running.samples[:40]
    for choice in running.samples[40:]:
        running.finish(choice, ending())
    assert await running.wait_ended() == running.samples[40:]
    assert await running.wait_ended() == []


async def test_who_does_not_stream_hears_of_a_failure():
    running = generation(n=2, streaming=False)
    running.finish(running.samples[0], ending())
    running.fail(Unavailable("lost"))
    with pytest.raises(Unavailable):
        await running.wait_ended()


async def test_closing_cancels_what_still_runs_and_nothing_else():
    cancelled = []
    for finished in (False, True):
        running = generation()
        running.scheduler_requests[0].holder = SimpleNamespace(
            act_on=lambda _, action, finished=finished: cancelled.append((action, finished))
        )
        if finished:
            running.finish(running.samples[0], ending())
        running.close()
    assert cancelled == [("cancel", False)]


async def test_what_is_closed_is_freed_without_a_search_for_cycles():
    end = SchedulerEnd()
    running = generation(n=2, streaming=False)
    end.session.submit(running.scheduler_requests[0])
    parts = [weakref.ref(part) for part in (running, running.scheduler_requests[0])]
    gc.disable()
    try:
        running.close()
        await end.reject(0, Unavailable("away"))
        del running
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()
