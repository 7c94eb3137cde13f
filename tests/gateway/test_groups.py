"""Groups at several schedulers: samples stay together, and stragglers end or are parked after a failover too."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from services.common.config import SchedulerConfig
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.codec import SampleAction, SampleEnding, encode_submit
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.session import Timings
from services.gateway.rollout import control
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.server import SchedulerServer
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import eventually_async
from tests.gateway.scheduler_end import SchedulerEnd, finish
from tokasaurus.scheduler.v1 import generate_pb2

PROMPT = list(range(50, 150))
LENGTHS = (3, 12)  # of the first samples; the others never end by themselves
MOST = 400


def token(tokens: Sequence[int], sample_index: int) -> int:
    """Return the next token. Samples 0 and 1 end when they have their lengths."""
    generated = len(tokens) - len(PROMPT)
    return 0 if sample_index < len(LENGTHS) and generated == LENGTHS[sample_index] - 1 else 200 + generated


class Schedulers:
    """Schedulers with held workers, and their fleet, in this process."""

    def __init__(self, count: int) -> None:
        self.workers = [FakeWorker(FakeShape(max_slots=64), token) for _ in range(count)]

    @classmethod
    @asynccontextmanager
    async def running(cls, count: int = 2):
        schedulers = cls(count)
        addresses = [await worker.start() for worker in schedulers.workers]
        schedulers.servers: list[SchedulerServer | None] = [
            SchedulerServer(SchedulerConfig(worker_addresses=(address,), scheduler_listen="127.0.0.1:0"))
            for address in addresses
        ]
        schedulers.fleet = Fleet(
            [await server.start() for server in schedulers.servers],
            tokenizer_fingerprint=Tokenizer.load("builtin").fingerprint,
            metrics=RequestMetrics(),
            timings=Timings(),
            turn=0,
        )
        schedulers.fleet.start()
        try:
            await eventually_async(lambda: all(replica.ready for replica in schedulers.fleet.replicas))
            for worker in schedulers.workers:
                worker.hold()
            yield schedulers
            assert not any(worker.violations for worker in schedulers.workers)
        finally:
            await schedulers.fleet.stop()
            for index in range(count):
                await schedulers.stop(index)
            for worker in schedulers.workers:
                await worker.stop()

    async def generate(self, name: str, prompt: Sequence[int] = PROMPT, n: int = 1, **settings) -> ActiveRequest:
        prompts = [
            PromptRequest(name, "tokasaurus-builtin", np.array(prompt, np.uint32), MOST, 7, Settings(n=n, **settings))
        ]
        return await self.fleet.generate(prompts, streaming=True)

    async def stop(self, index: int) -> None:
        server, self.servers[index] = self.servers[index], None
        if server is not None:
            await server.stop()

    def requests(self) -> list[list[Request]]:
        """Return the unfinished requests of each scheduler."""
        return [[] if server is None else server.engine.ask(_requests).result(60) for server in self.servers]


def _requests(core: Scheduler) -> list[Request]:
    return list(core.state.queue.requests.values())


async def ended(running: ActiveRequest, *numbers: int) -> None:
    """Wait for the ends of samples."""
    async with asyncio.timeout(60):
        while any(running.samples[number].ending is None for number in numbers):
            assert await running.wait_updated()


# -- failover


async def lose_a_scheduler_after_the_first_end(schedulers: Schedulers, running: ActiveRequest) -> FakeWorker:
    """Stop the scheduler of ``running``. Return the other one's held worker when it has all unfinished samples."""
    await running.wait_accepted()
    first = next(index for index, requests in enumerate(schedulers.requests()) if requests)
    schedulers.workers[first].release(plans=6)
    await ended(running, 0)
    await schedulers.stop(first)
    other = 1 - first
    await eventually_async(lambda: all(each.accepted and each.attempt for each in running.scheduler_requests))
    await eventually_async(lambda: len(schedulers.requests()[other]) == len(running.scheduler_requests))
    return schedulers.workers[other]


async def test_samples_that_finished_before_a_failover_count():
    async with Schedulers.running() as schedulers:
        running = await schedulers.generate("group", n=4, end_after=2)
        worker = await lose_a_scheduler_after_the_first_end(schedulers, running)
        assert [each.ending is None for each in running.samples] == [False, True, True, True]
        worker.release(plans=30)
        await ended(running, 0, 1, 2, 3)
        assert [each.outcome.reason for each in running.samples] == ["stop", "stop", "abort", "abort"]
        for sample in running.samples[2:]:
            ids, _ = sample.take()
            assert list(ids) == [200 + index for index in range(len(ids))]
            assert len(ids) == sample.outcome.completion_tokens < MOST
        running.close()


@pytest.mark.slow
async def test_stragglers_are_parked_after_a_failover():
    async with Schedulers.running() as schedulers:
        running = await schedulers.generate("group", n=3, park_after=2)
        worker = await lose_a_scheduler_after_the_first_end(schedulers, running)
        worker.release(plans=30)
        await ended(running, 1)
        await eventually_async(lambda: all(each.parked for requests in schedulers.requests() for each in requests))
        worker.release()
        await ended(running, 2)
        assert running.samples[2].outcome.reason == "length"
        running.close()


def group(n: int, prompts: int = 1, **settings) -> ActiveRequest:
    prompt, asked = np.array([1, 2, 3], np.uint32), Settings(n=n, **settings)
    made = [PromptRequest(f"r-{number}", "m", prompt, 50, 7, asked) for number in range(prompts)]
    return ActiveRequest(made, streaming=False)


class Holder:
    """Keeps the actions that it is asked for."""

    def __init__(self) -> None:
        self.actions: list[tuple[str, SampleAction]] = []

    def act_on(self, request, action: SampleAction) -> None:
        self.actions.append((request.submission.request_id, action))


def test_a_scheduler_counts_a_whole_group_and_the_gateway_counts_a_split_group():
    running = group(4, end_after=3, park_after=1)
    [whole] = running.scheduler_requests
    sent = encode_submit(whole.submission).submit.request
    assert (sent.stragglers.end_after, sent.stragglers.park_after) == (3, 1)
    [*parts] = running.replace_lost({each: np.arange(1, dtype=np.uint32) for each in running.samples})
    for part in parts:
        assert not encode_submit(part.submission).submit.request.HasField("stragglers")
        assert part.due_action is None


def test_every_scheduler_of_a_split_group_is_asked_once_for_each_action():
    running = group(4, prompts=2, end_after=3, park_after=1)
    holder = Holder()
    for request in running.replace_lost({each: np.arange(1, dtype=np.uint32) for each in running.samples}):
        request.holder = holder
    [first, second, third, last, *other] = running.samples
    ending = SampleEnding("stop", False, 0, 3, 1, 0, 0.0, 0.0, 0.0, None)
    running.finish(other[0], replace(ending, reason="abort"))  # does not count
    assert not holder.actions
    running.finish(first, ending)
    assert [action for _, action in holder.actions] == ["park"] * 4
    assert {name for name, _ in holder.actions} == {f"r-0+1.{each}" for each in range(4)}
    running.finish(second, ending)
    assert len(holder.actions) == 4
    running.finish(third, ending)
    assert [action for _, action in holder.actions[4:]] == ["end"] * 4
    running.finish(last, replace(ending, reason="abort"))
    assert len(holder.actions) == 8


async def test_a_part_that_is_sent_after_enough_samples_have_finished_is_followed_by_the_action():
    end = SchedulerEnd()
    running = group(3, end_after=1)
    [whole] = running.scheduler_requests
    end.session.submit(whole)
    await end.outputs(handles=[0, 1, 2], token_ids=[5, 6, 7], finished={0: finish()})
    later = SchedulerEnd()
    for part in running.replace_lost(end.session.abandon()):
        later.session.submit(part)
    await later.send()
    written = [message for message in later.written if not message.HasField("heartbeat")]
    assert [message.WhichOneof("payload") for message in written] == ["submit", "submit", "end"]
    assert list(written[-1].end.handles) == [0, 1]
    reason = generate_pb2.FINISH_REASON_ABORTED
    usage = generate_pb2.Usage(prompt_tokens=3, completion_tokens=1)
    aborted = generate_pb2.Finish(reason=reason, usage=usage)
    await later.outputs(finished={0: aborted, 1: aborted})
    assert {sample.outcome.reason for sample in await running.wait_ended()} == {"length", "abort"}


async def test_an_older_scheduler_is_not_asked_to_end_samples():
    """It would end the session, and with it the requests of others."""
    end = SchedulerEnd(controls_stragglers=False)
    running = group(3, end_after=1)
    ending = SampleEnding("stop", False, 0, 3, 1, 0, 0.0, 0.0, 0.0, None)
    parts = running.replace_lost({each: np.arange(1, dtype=np.uint32) for each in running.samples})
    running.finish(running.samples[0], ending)
    for part in parts[1:]:
        end.session.submit(part)
    await end.send()
    assert "end" not in [message.WhichOneof("payload") for message in end.written]


async def test_groups_with_stragglers_go_to_schedulers_that_can_end_them():
    async with Schedulers.running() as schedulers:
        older = schedulers.fleet.replicas[0]
        older.model = replace(older.model, contract_version="1.12")
        groups = [await schedulers.generate(f"group{number}", [number] * 30, n=4, end_after=2) for number in range(4)]
        for each in groups:
            await each.wait_accepted()
        assert [len(each) for each in schedulers.requests()] == [0, 4]
        for each in groups:
            each.close()


async def test_an_abort_of_a_group_leaves_the_answers_of_finished_samples():
    async with Schedulers.running() as schedulers:
        running, other = await schedulers.generate("group", n=4), await schedulers.generate("grouped", n=1)
        await running.wait_accepted()
        for worker in schedulers.workers:
            worker.release(plans=6)
        await ended(running, 0)
        assert await control.abort(schedulers.fleet, ["group"]) == 3
        await ended(running, 1, 2, 3)
        assert [each.outcome.reason for each in running.samples] == ["stop", "abort", "abort", "abort"]
        for sample in running.samples:
            ids, _ = sample.take()
            assert list(ids) == [200 + index for index in range(len(ids))]
        for worker in schedulers.workers:
            worker.release()
        await ended(other, 0)
        assert other.samples[0].outcome.reason == "stop"
        running.close()
        other.close()


# -- placement


async def test_the_samples_of_a_request_are_at_one_scheduler_and_requests_at_both():
    async with Schedulers.running() as schedulers:
        groups = [await schedulers.generate(f"group{number}", [20 + number, *PROMPT], n=8) for number in range(8)]
        for each in groups:
            await each.wait_accepted()
        first, second = schedulers.requests()
        assert {each.n for each in (*first, *second)} == {8}
        assert len(first) + len(second) == 8
        assert first
        assert second
        for each in groups:
            each.close()


@pytest.mark.slow
async def test_the_samples_of_a_prompt_stay_together_after_a_failover():
    """The prompt is shorter than the blocks by which the router finds prefixes."""
    async with Schedulers.running(3) as schedulers:
        groups = [await schedulers.generate(f"group{number}", [20 + number] * 30, n=8) for number in range(3)]
        for each in groups:
            await each.wait_accepted()
        assert [len(each) for each in schedulers.requests()] == [1, 1, 1]
        schedulers.workers[0].release(plans=6)
        [lost] = [each for each in groups if each.request_id == schedulers.requests()[0][0].request_id]
        async with asyncio.timeout(60):
            while not all(len(sample.new_ids) for sample in lost.samples):
                assert await lost.wait_updated()
        await schedulers.stop(0)
        await eventually_async(lambda: len(lost.scheduler_requests) == 8 and sum(map(len, schedulers.requests())) == 10)
        assert sorted(map(len, schedulers.requests())) == [0, 1, 9]
        for each in groups:
            each.close()


async def test_requests_of_one_sample_with_one_prompt_stay_together():
    """They share a block of 64 tokens, and are less work than the slack of the router."""
    async with Schedulers.running() as schedulers:
        groups = [await schedulers.generate(f"{number}", PROMPT) for number in range(8)]
        for each in groups:
            await each.wait_accepted()
        assert sorted(len(each) for each in schedulers.requests()) == [0, 8]
        for each in groups:
            each.close()
