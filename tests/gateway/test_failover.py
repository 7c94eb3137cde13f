"""What goes on elsewhere, when, and what does not."""

import asyncio

import numpy as np
import pytest

from services.common.errors import Internal, InvalidRequest, Overloaded, TokaError, Unavailable
from services.gateway.engine.active_request import ActiveRequest, SchedulerRequest
from services.gateway.engine.codec import PromptScores, SampleEnding, encode_submit
from services.gateway.engine.failover import Failover
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.quarantine import PROVEN, SUSPICIOUS
from services.gateway.engine.request import PromptRequest, Settings
from tests.gateway.scheduler_end import error_of, failovers
from tokasaurus.common.v1.sampling_pb2 import Sampling

LOST = Unavailable("the scheduler was lost: it died; send the request again")
NOTHING = np.zeros(0, np.uint32)


def generation(
    n: int = 1, *, prompts: int = 1, seed: int | None = 7, streaming: bool = False, **settings
) -> ActiveRequest:
    prompt, asked = np.array([1, 2, 3], np.uint32), Settings(n=n, **settings)
    jobs = [PromptRequest(f"r-{number}", "m", prompt, 50, seed, asked) for number in range(prompts)]
    return ActiveRequest(jobs, streaming=streaming)


def tokens(running: ActiveRequest, *counts: int) -> dict:
    """So many tokens came of each of its choices."""
    return {choice: np.arange(count, dtype=np.uint32) for choice, count in zip(running.samples, counts, strict=False)}


class Scheduler:
    """Stands for a replica: keeps what it is sent."""

    backlog = 0

    def __init__(self) -> None:
        self.calls: asyncio.Queue[SchedulerRequest] = asyncio.Queue()

    def submit(self, call: SchedulerRequest) -> None:
        self.calls.put_nowait(call)


class Place:
    """A failover that runs, and the one scheduler that is ready, or None."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.scheduler: Scheduler | None = Scheduler()
        self.avoided: list[str | None] = []
        self.metrics = RequestMetrics()
        self.failover = Failover(self._choose, self.metrics, timeout_s)

    def _choose(self, call: SchedulerRequest, not_this: str | None) -> Scheduler | None:
        self.avoided.append(not_this)
        return self.scheduler

    async def __aenter__(self) -> "Place":
        self._task = asyncio.create_task(self.failover.run())
        return self

    async def __aexit__(self, *_) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def sent(self, count: int) -> list[SchedulerRequest]:
        """The next calls that are sent."""
        async with asyncio.timeout(60):
            return [await self.scheduler.calls.get() for _ in range(count)]


async def failed(running: ActiveRequest) -> TokaError:
    with pytest.raises(TokaError) as caught:
        async with asyncio.timeout(60):
            await running.wait_ended()
    return caught.value


def test_samples_without_a_token_go_together_and_others_from_where_they_are():
    running = generation(8)
    [first] = running.scheduler_requests
    calls = running.replace_lost(tokens(running, 0, 0, 5, 0, 0, 0, 1, 0))
    assert [(call.submission.first, call.submission.n, len(call.submission.generated_ids)) for call in calls] == [
        (0, 2, 0), (2, 1, 5), (3, 3, 0), (6, 1, 1), (7, 1, 0),
    ]  # fmt: skip
    assert running.scheduler_requests == calls
    assert len({call.submission.request_id for call in (first, *calls)}) == 6
    assert {call.submission.seed for call in calls} == {7}
    again = running.replace_lost({running.samples[2]: np.array([9], np.uint32), running.samples[4]: NOTHING})
    assert [call.submission.generated_ids.tolist() for call in again] == [[0, 1, 2, 3, 4, 9], []]
    assert [call.submission.first for call in again] == [2, 4]
    assert len({call.submission.request_id for call in (first, *calls, *again)}) == 8


def test_a_request_that_had_not_begun_is_sent_as_it_was():
    running = generation(3)
    [call] = running.replace_lost(tokens(running, 0, 0, 0))
    assert not call.submission.resumes
    assert call.samples == running.samples


def test_a_request_without_a_seed_keeps_the_one_that_was_drawn():
    running = generation(seed=None)
    seed = running.scheduler_requests[0].submission.seed
    assert 0 <= seed < 2**64
    assert running.replace_lost(tokens(running, 4))[0].submission.seed == seed
    assert generation(seed=None).scheduler_requests[0].submission.seed != seed


def test_of_samples_that_were_sent_together_each_may_be_lost_in_its_turn():
    running = generation(3)
    [call] = running.scheduler_requests
    [first] = running.replace_lost({running.samples[1]: np.array([4], np.uint32)})
    assert running.scheduler_requests == [call, first]
    assert call.samples == [running.samples[0], running.samples[2]]
    [again, other] = running.replace_lost({running.samples[0]: NOTHING, running.samples[1]: NOTHING})
    assert [again.samples, other.samples] == [[running.samples[0]], [running.samples[1]]]
    assert other.submission.generated_ids.tolist() == [4]
    [last] = running.replace_lost({running.samples[2]: NOTHING})
    assert running.scheduler_requests == [again, other, last]
    assert len({each.submission.request_id for each in (call, first, again, other, last)}) == 5


def test_scores_of_a_prompt_that_were_asked_for_twice_are_taken_once():
    running = generation(prompt_logprobs=1)
    none = np.zeros(0, np.float32)
    for place in (1, 1, 2, 2, 1):
        running.add_prompt_scores(0, PromptScores(place, np.ones(1, np.float32), NOTHING, NOTHING, none))
    assert [scores.start for scores in running.prompt_scores[0]] == [1, 2]


def test_scores_before_the_position_that_was_asked_for_are_dropped():
    """A scheduler that does not know prompt_logprobs_start sends them all."""
    running = generation(prompt_logprobs=1, prompt_logprobs_start=2)
    running.add_prompt_scores(0, PromptScores(1, np.arange(2, dtype=np.float32), *[np.zeros((2, 0))] * 3))
    [scores] = running.prompt_scores[0]
    assert (scores.start, scores.logprobs.tolist()) == (2, [1.0])
    [call] = running.replace_lost(tokens(running, 0))
    assert not call.submission.scores  # the last of three tokens was the only one


def test_a_sample_goes_on_with_its_thinking_budget():
    """The scheduler counts what was generated, and looks at the prompt alone."""
    running = generation(sampling=Sampling(thinking={"tokens": 8}))
    [call] = running.replace_lost({running.samples[0]: np.array([4, 5], np.uint32)})
    request = encode_submit(call.submission).submit.request
    assert request.sampling.thinking.tokens == 8
    assert not request.sampling.thinking.HasField("opened")
    assert (request.resume.generated_tokens, list(request.tokens.token_ids)) == (2, [1, 2, 3, 4, 5])


def test_only_what_is_lost_is_sent_again():
    running = generation(2, prompts=2)
    kept = running.scheduler_requests[1]
    [call] = running.replace_lost(tokens(running, 0, 0))
    assert call.submission.prompt.request_id == "r-0"
    assert running.scheduler_requests == [kept, call]


@pytest.mark.parametrize("told", [0, 1, 2])
def test_log_probabilities_of_a_prompt_are_asked_for_again_until_they_were_told(told):
    running = generation(2, prompt_logprobs=1)
    none = np.zeros(0, np.float32)
    for place in range(1, 1 + told):
        running.add_prompt_scores(0, PromptScores(place, np.ones(1, np.float32), NOTHING, NOTHING, none))
    calls = running.replace_lost(tokens(running, 1, 0))
    assert [call.submission.scores for call in calls] == [told < 2, False]
    assert len(running.prompt_scores[0]) == (told if told == 2 else 0)


def test_what_a_stream_was_told_already_is_not_told_again_and_times_add_up():
    running = generation(streaming=True)
    [choice] = running.samples
    running.add_tokens(choice, [5, 6], None)
    running.replace_lost({choice: np.array([5, 6], np.uint32)})
    choice.failover_delay_s = 2.0
    running.add_tokens(choice, [7], None)
    running.finish(choice, SampleEnding("stop", False, 0, 3, 3, 0, 0.5, 0.25, 1.0, None))
    assert choice.take()[0] == [5, 6, 7]
    assert (choice.ending.queued_s, choice.ending.prefill_s, choice.ending.decode_s) == (0.5, 0.25, 3.0)


async def test_what_is_lost_is_sent_again_and_counted():
    async with Place() as place:
        running = generation(2, streaming=True)
        running.on_accepted()
        running.scheduler_requests[0].accepted = True
        place.failover.lose(tokens(running, 3, 0), LOST, "hung")
        calls = await place.sent(2)
        assert [len(call.submission.generated_ids) for call in calls] == [3, 0]
        assert all(call.accepted for call in calls)  # the client was told once
        assert failovers(place.metrics) == {"hung": 2}


async def test_a_request_that_schedulers_die_of_is_not_sent_for_ever():
    async with Place() as place:
        running = generation()
        for _ in range(SUSPICIOUS + PROVEN - 1):
            place.failover.lose(tokens(running, 0), LOST, "lost")
            await place.sent(1)
        place.failover.lose(tokens(running, 0), LOST, "drained")  # not its fault
        await place.sent(1)
        place.failover.lose(tokens(running, 0), LOST, "hung")
        error = await failed(running)
    assert isinstance(error, Internal)
    assert error.reason == "SCHEDULERS_LOST"
    assert "it died" in error.message


async def test_of_many_that_were_lost_together_only_the_one_that_schedulers_die_of_ends():
    """Whatever has no token yet looks the same."""
    async with Place() as place:
        many = [generation() for _ in range(12)]
        poison, well, here = many[5], set(), set(many)
        deaths = 0
        while error_of(poison) is None:
            if poison in here:
                deaths += 1
                lost = {running.samples[0]: NOTHING for running in here}
                here.clear()
                place.failover.lose(lost, LOST, "lost")
            else:
                for running in here:  # they get on
                    running.samples[0].losses = 0
                well |= here
                here.clear()
            if error_of(poison) is None:
                [call] = await place.sent(1)
                here.add(call.parent)
        assert isinstance(error_of(poison), Internal)
        assert [error_of(running) for running in many if running is not poison] == [None] * 11
        assert SUSPICIOUS + PROVEN <= deaths < 9


@pytest.mark.slow
async def test_schedulers_that_die_of_something_else_cost_nobody_a_request():
    """However often, and without a token in between, as long as there are several of them."""
    async with Place() as place:
        many = [generation() for _ in range(4)]
        here = {running.samples[0]: NOTHING for running in many}
        for _ in range(3 * PROVEN):
            place.failover.lose(here, LOST, "lost")
            here = {choice: NOTHING for call in await place.sent(2) for choice in call.samples}
        assert [error_of(running) for running in many] == [None] * 4


async def test_who_gets_on_after_losses_alone_is_innocent():
    async with Place() as place:
        running = generation()
        for _ in range(3):
            for _ in range(SUSPICIOUS + PROVEN - 1):
                place.failover.lose(tokens(running, 0), LOST, "lost")
                await place.sent(1)
            running.samples[0].losses = running.samples[0].sole_suspect_losses = 0  # a token
        assert error_of(running) is None


async def test_a_new_request_waits_for_a_scheduler_and_is_not_counted_as_lost():
    async with Place() as place:
        running = generation()
        place.failover.enqueue(running.scheduler_requests[0], LOST)
        assert await place.sent(1) == running.scheduler_requests
        assert failovers(place.metrics) == {}


async def test_not_too_many_new_requests_wait(monkeypatch):
    monkeypatch.setattr("services.gateway.engine.failover._MAX_QUEUED", 2)
    place = Place()
    for _ in range(2):
        place.failover.enqueue(generation().scheduler_requests[0], LOST)
    with pytest.raises(Overloaded, match="2 requests wait"):
        place.failover.enqueue(generation().scheduler_requests[0], LOST)


async def test_a_request_that_cannot_be_written_ends_alone(monkeypatch):
    async with Place() as place:
        cursed, good = generation(), generation()
        submit = place.scheduler.submit

        def fails_for_one(call: SchedulerRequest) -> None:
            if call.parent is cursed:
                raise ValueError("cursed")
            submit(call)

        monkeypatch.setattr(place.scheduler, "submit", fails_for_one)
        for running in (cursed, good):
            place.failover.lose(tokens(running, 0), LOST, "lost")
        assert (await place.sent(1))[0].parent is good
        assert isinstance(await failed(cursed), Internal)


async def test_a_request_that_cannot_go_on_elsewhere_ends_alone(monkeypatch):
    async with Place() as place:
        first, cursed, last = (generation() for _ in range(3))

        def fails(_) -> list[SchedulerRequest]:
            raise ValueError("cursed")

        monkeypatch.setattr(cursed, "replace_lost", fails)
        place.failover.lose({running.samples[0]: NOTHING for running in (first, cursed, last)}, LOST, "lost")
        assert [call.parent for call in await place.sent(2)] == [first, last]
        assert isinstance(await failed(cursed), Internal)


async def test_who_waits_for_too_long_hears_of_the_loss():
    async with Place(timeout_s=0.05) as place:
        place.scheduler = None
        running = generation()
        place.failover.lose(tokens(running, 0), LOST, "lost")
        assert await failed(running) is LOST


async def test_without_patience_a_loss_ends_a_request():
    place = Place(timeout_s=0.0)
    running, refused = generation(), generation()
    place.failover.lose(tokens(running, 0), LOST, "lost")
    place.failover.refused(refused.scheduler_requests[0], LOST, "here")
    assert await failed(running) is LOST
    assert await failed(refused) is LOST


async def test_a_scheduler_that_is_away_is_passed_by_and_a_full_one_is_asked_again():
    async with Place() as place:
        new, old = generation(), generation()
        place.failover.refused(new.scheduler_requests[0], Unavailable("draining", reason="DRAINING"), "here")
        assert await place.sent(1) == new.scheduler_requests
        assert place.avoided[-1] == "here"
        old.scheduler_requests[0].accepted = True
        for _ in range(3):
            place.failover.refused(old.scheduler_requests[0], Overloaded("full", retry_after_s=0.01), "here")
            assert await place.sent(1) == old.scheduler_requests
        place.failover.refused(new.scheduler_requests[0], Overloaded("full", retry_after_s=0.01), "here")
        assert isinstance(await failed(new), Overloaded)  # it was in no queue before
        place.failover.refused(old.scheduler_requests[0], InvalidRequest("wrong"), "here")
        assert isinstance(await failed(old), InvalidRequest)


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_abort_of_a_queued_request_leaves_the_tokens_of_lost_schedulers(streaming):
    async with Place() as place:
        scheduler, place.scheduler = place.scheduler, None
        running = generation(prompts=2, streaming=streaming)
        aborted, other = running.samples
        if streaming:
            running.add_tokens(aborted, [0, 1, 2], None)
        place.failover.lose(tokens(running, 3, 0), LOST, "lost")
        assert place.failover.abort(["r-0"]) == 1
        assert (aborted.ending.reason, aborted.ending.completion_tokens) == ("abort", 3)
        assert list(aborted.take()[0]) == [0, 1, 2]
        place.scheduler = scheduler
        place.failover.wake()
        [sent] = await place.sent(1)
        assert (sent.samples, other.ending) == ([other], None)
        assert place.failover.abort(None) == 0


@pytest.mark.parametrize("lost", ["before the group ends", "after the group has ended"])
async def test_queued_stragglers_end_without_a_scheduler(lost):
    async with Place() as place:
        place.scheduler = None
        running = generation(3, end_after=1)
        first, *stragglers = running.samples
        if "before" in lost:
            place.failover.lose(dict.fromkeys(stragglers, NOTHING), LOST, "lost")
        running.finish(first, SampleEnding("length", False, 0, 3, 50, 0, 0.0, 0.0, 0.0, None))
        if "after" in lost:
            place.failover.lose(dict.fromkeys(stragglers, NOTHING), LOST, "lost")
        async with asyncio.timeout(60):
            ended = await running.wait_ended()
        assert {each.index: each.outcome.reason for each in ended} == {0: "length", 1: "abort", 2: "abort"}


async def test_stragglers_that_are_refused_after_their_group_has_ended_end_too():
    async with Place() as place:
        running = generation(2, end_after=1)
        place.failover.lose({running.samples[1]: NOTHING}, LOST, "lost")
        [sent] = await place.sent(1)
        place.scheduler = None
        running.finish(running.samples[0], SampleEnding("length", False, 0, 3, 50, 0, 0.0, 0.0, 0.0, None))
        place.failover.refused(sent, LOST, "here")
        assert running.samples[1].ending.reason == "abort"


async def test_what_is_closed_while_it_waits_is_forgotten_and_what_comes_late_is_told_why():
    async with Place() as place:
        scheduler, place.scheduler = place.scheduler, None
        closed, waiting, late = generation(), generation(), generation()
        place.failover.lose(tokens(closed, 1), LOST, "lost")
        place.failover.lose(tokens(waiting, 1), LOST, "lost")
        closed.close()
        end = Unavailable("the gateway is shutting down")
        place.failover.fail_all(end)
        place.scheduler = scheduler
        place.failover.wake()
        place.failover.lose(tokens(late, 1), LOST, "lost")
        assert await failed(waiting) is end
        assert await failed(late) is end
        assert scheduler.calls.empty()
