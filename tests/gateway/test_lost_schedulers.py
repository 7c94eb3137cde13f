"""Schedulers are lost, and requests go on: no token is missing, none comes twice, and nothing else is different."""

import asyncio
import signal
from collections.abc import Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from services.common.errors import Unavailable
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine import codec
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.session import Session, Timings
from tests.fakes.model import FakeShape, continuation
from tests.gateway.deployment import eventually_async
from tests.gateway.replicas import Asked, Engines, Replicas, answers
from tests.gateway.scheduler_end import failovers
from tokasaurus.common.v1.sampling_pb2 import Sampling

MANY = 30
PROMPT = list(range(50, 90))
_names = count()


def ask(sdk, numbers: Iterable[int] = range(MANY)) -> list[Asked]:
    """Streams, and others, with all that a resumed sample has to keep."""
    return [
        Asked(
            sdk,
            stream=stream,
            prompt=[40 + number, *PROMPT],
            max_tokens=50 + number,
            n=3,
            temperature=0.8,
            seed=number,
            **({"stop": ["the", "zz"]} if number % 3 else {"logprobs": 1}),
        )
        for number in numbers
        for stream in (True, False)
    ]


async def begun(asked: list[Asked]) -> None:
    """Until each stream has said something."""
    for each in asked[::2]:
        waits = asyncio.create_task(each.begun.wait())
        await asyncio.wait((waits, each.task), return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert waits.done(), each.task.exception()


@pytest.mark.slow
async def test_of_two_schedulers_one_is_killed_and_every_answer_is_what_it_would_have_been(tmp_path):
    async with (
        Replicas.running(tmp_path, 2, worker={"step_ms": 20}) as pair,
        pair.deployment.async_sdk() as sdk,
    ):
        asked = ask(sdk, range(8))  # of more, the first might be at their end before all have begun
        await begun(asked)
        pair.schedulers[0].kill()
        asked += ask(sdk, range(8, MANY))
        found = await answers(asked)
        assert await asyncio.to_thread(pair.deployment.metric, "toka_failovers_total") > 0
        assert found == await answers(ask(sdk))
        assert {len(answer[0]) for answer in found} == {3}


@pytest.mark.slow
async def test_a_single_scheduler_comes_back_and_goes_on(tmp_path):
    async with (
        Replicas.running(tmp_path, 1, worker={"step_ms": 10}) as single,
        single.deployment.async_sdk() as sdk,
    ):
        asked = ask(sdk, range(10))
        await begun(asked[:8])
        single.schedulers[0].kill()
        await eventually_async(lambda: single.ready == 0)
        single.schedulers[0].start()
        assert await answers(asked) == await answers(ask(sdk, range(10)))


# From here on without HTTP, which has no part in it.


@pytest.fixture(scope="module")
def fingerprint():
    return Tokenizer.load("builtin").fingerprint


class Metered(Fleet):
    """A fleet whose metrics a test reads."""

    def __init__(self, addresses: list[str], fingerprint: str, **timings) -> None:
        self.metrics = RequestMetrics()
        super().__init__(addresses, tokenizer_fingerprint=fingerprint, metrics=self.metrics, timings=Timings(**timings))


@asynccontextmanager
async def fleet_of(engines: Engines, fingerprint: str, **timings):
    """All its schedulers are ready."""
    fleet = Metered(engines.addresses, fingerprint, **timings)
    fleet.start()
    try:
        await eventually_async(lambda: all(replica.ready for replica in fleet.replicas))
        yield fleet
    finally:
        await fleet.stop()
        engines.stop()


async def some(
    fleet: Fleet, requests: int, *, streaming: bool = True, tokens: int = 60, n: int = 2
) -> list[ActiveRequest]:
    """Requests on their way."""
    jobs = [
        PromptRequest(
            f"r-{next(_names)}", "tokasaurus-builtin", np.array([100 + number, *PROMPT], np.uint32), tokens, number,
            Settings(n=n, sampling=Sampling(temperature=1.0)),
        )
        for number in range(requests)
    ]  # fmt: skip
    return [await fleet.generate([job], streaming=streaming) for job in jobs]


async def first_tokens(running: list[ActiveRequest]) -> None:
    """Until something came of each; of streams."""
    async with asyncio.timeout(60):
        for each in running:
            assert await each.wait_updated()


async def ends(running: list[ActiveRequest]) -> None:
    """Wait for all, and compare their tokens with those of a model that nobody disturbs."""
    for each in running:
        async with asyncio.timeout(60):
            while await each.wait_updated() if each.per_token else await each.wait_ended():
                pass
        part = each.scheduler_requests[0].submission
        for choice in each.samples:
            expected = continuation(
                FakeShape(), part.prompt.prompt_ids.tolist(), part.prompt.max_tokens, seed=part.seed,
                sample_index=choice.index,
            )  # fmt: skip
            assert list(choice.new_ids) == expected
            assert choice.ending.reason == "length"
            assert choice.ending.completion_tokens == part.prompt.max_tokens
            assert choice.ending.prompt_tokens == len(part.prompt.prompt_ids)


@pytest.mark.slow
async def test_a_scheduler_that_hangs_and_comes_to_says_nothing_twice(tmp_path, fingerprint):
    engines = Engines(tmp_path, 1, worker={"step_ms": 10})
    async with fleet_of(engines, fingerprint, heartbeat_interval=0.2, heartbeat_timeout=2.0) as fleet:
        running = await some(fleet, 5)
        await first_tokens(running)
        engines.schedulers[0].signal(signal.SIGSTOP)
        await eventually_async(lambda: not fleet.replicas[0].ready)
        engines.schedulers[0].signal(signal.SIGCONT)
        await ends(running)
        assert failovers(fleet.metrics) == {"hung": 10}


@pytest.mark.slow
async def test_requests_leave_a_scheduler_whose_worker_is_away(tmp_path, fingerprint):
    engines = Engines(tmp_path, 2, worker={"step_ms": 10})
    async with fleet_of(engines, fingerprint, move_after=0.1) as fleet:
        running = await some(fleet, 6)
        await first_tokens(running)
        engines.workers[0].kill()
        await ends(running)
        counted = failovers(fleet.metrics)
        assert set(counted) == {"worker"}
        assert 0 < counted["worker"] < 12
        assert not fleet.replicas[0].ready


@pytest.mark.slow
async def test_a_scheduler_that_drains_hands_over_what_is_left(tmp_path, fingerprint):
    engines = Engines(tmp_path, 2, worker={"step_ms": 10}, drain_seconds=0.2)
    async with fleet_of(engines, fingerprint) as fleet:
        running = await some(fleet, 3) + await some(fleet, 3, streaming=False)
        await first_tokens(running[:3])
        engines.schedulers[0].signal(signal.SIGTERM)
        while not fleet.replicas[0].trouble:  # new ones meet it before and after it says so
            running += await some(fleet, 2, tokens=5)
            await asyncio.sleep(0.01)
        await ends(running)
        assert engines.schedulers[0].wait() == 0
        assert set(failovers(fleet.metrics)) <= {"drained", "refused"}


@pytest.mark.slow
async def test_what_was_in_a_queue_is_not_refused_by_a_full_one(tmp_path, fingerprint):
    engines = Engines(tmp_path, 2, worker={"max_slots": 4, "step_ms": 40}, max_queued_sequences=20)
    async with fleet_of(engines, fingerprint) as fleet:
        running = await some(fleet, 40, streaming=False, tokens=20, n=1)  # of which 24 have room in each
        await eventually_async(lambda: all(replica.load.waiting_sequences > 5 for replica in fleet.replicas))
        engines.schedulers[0].kill()
        await ends(running)
        assert set(failovers(fleet.metrics)) == {"lost"}


@pytest.mark.slow
async def test_a_thousand_samples_go_on_at_once(tmp_path, fingerprint):
    engines = Engines(tmp_path, 2, worker={"step_ms": 20})
    async with fleet_of(engines, fingerprint) as fleet:
        running = await some(fleet, 500, streaming=False, tokens=20)
        await eventually_async(lambda: all(replica.load.running_sequences for replica in fleet.replicas))
        engines.schedulers[0].kill()
        await ends(running)
        assert 100 < failovers(fleet.metrics)["lost"] <= 1000


async def test_a_new_request_waits_for_a_scheduler_as_one_does_that_lost_its_own(tmp_path, fingerprint):
    engines = Engines(tmp_path, 1)
    async with fleet_of(engines, fingerprint, wait_for_ready=0.01) as fleet:
        engines.schedulers[0].kill()
        await eventually_async(lambda: not fleet.replicas[0].ready)
        assert (await fleet.model(None)).id == "tokasaurus-builtin"  # known, though nobody serves it
        running = await some(fleet, 3) + await some(fleet, 3, streaming=False)
        engines.schedulers[0].start()
        await ends(running)
        assert failovers(fleet.metrics) == {}  # they lost nothing


async def test_who_comes_while_a_worker_boots_waits_for_it_and_who_comes_for_nobody_does_not(tmp_path, fingerprint):
    engines = Engines(tmp_path, 1)
    for process in (*engines.workers, *engines.schedulers):
        process.kill()
    fleet = Fleet(
        engines.addresses,
        tokenizer_fingerprint=fingerprint,
        metrics=RequestMetrics(),
        timings=Timings(wait_for_ready=0.1),
    )
    fleet.start()
    try:
        with pytest.raises(Unavailable, match="no scheduler is ready"):
            await fleet.model(None)
        engines.schedulers[0].start()
        await eventually_async(lambda: "worker has not connected" in fleet.trouble)
        waits = asyncio.create_task(fleet.model(None))
        await asyncio.wait([waits], timeout=0.5)  # longer than for nobody
        assert not waits.done()
        engines.workers[0].start()
        async with asyncio.timeout(60):
            assert (await waits).id == "tokasaurus-builtin"
    finally:
        await fleet.stop()
        engines.stop()


async def test_who_waits_for_a_scheduler_when_the_gateway_ends_hears_why(tmp_path, fingerprint):
    engines = Engines(tmp_path, 1)
    async with fleet_of(engines, fingerprint) as fleet:
        engines.schedulers[0].kill()
        await eventually_async(lambda: not fleet.replicas[0].ready)
        [waiting] = await some(fleet, 1)
        empty = Metered(engines.addresses, fingerprint)  # it has not asked its schedulers yet
        unknown = asyncio.create_task(empty.model(None))
        await asyncio.sleep(0)
        end = Unavailable("the gateway is shutting down")
        for each in (fleet, empty):
            each.fail_all(end)
        for asked in (waiting.wait_updated(), unknown):
            with pytest.raises(Unavailable) as caught:
                await asked
            assert caught.value is end
        with pytest.raises(Unavailable, match="shutting down"):
            await some(fleet, 1)


@pytest.mark.slow
async def test_samples_sent_together_are_lost_one_by_one_and_none_is_forgotten(tmp_path, fingerprint):
    """Some had a token at the second scheduler when its worker went, and others had none: those stay."""
    engines = Engines(tmp_path, 2, worker={"step_ms": 20, "max_slots": 2})
    async with fleet_of(engines, fingerprint, move_after=1e6) as fleet:
        [running] = await some(fleet, 1, n=6)
        await first_tokens([running])
        await eventually_async(lambda: any(replica.load.running_sequences for replica in fleet.replicas))
        owner = next(replica for replica in fleet.replicas if replica.load.running_sequences)
        session = running.scheduler_requests[0].holder
        for choice in running.samples:
            choice.losses = int(choice.index % 2)  # as if lost before, and without a token since
        owner.move_requests()
        moved = [each for each in running.scheduler_requests if each.holder is not session]
        assert {choice.index for each in moved for choice in each.samples} <= {0, 2, 4}
        engines.schedulers[fleet.replicas.index(owner)].kill()
        await ends([running])


@pytest.fixture
def joined(monkeypatch) -> list[int]:
    """The number of requests in each message that sessions took from their outbox, in order."""
    sizes, join = [], codec.join_submits

    def counted(messages):
        sizes.append(len(messages))
        return join(messages)

    monkeypatch.setattr(codec, "join_submits", counted)
    return sizes


@pytest.mark.parametrize("failover_s", [120.0, 0.0])
@pytest.mark.slow
async def test_joined_requests_of_a_killed_scheduler_each_end_once(
    tmp_path, fingerprint, joined, failover_s, monkeypatch
):
    """When the scheduler is killed, some of its requests run, some are in messages that it has not read, and some are
    in the outbox. Without failover each of them ends with an error."""
    engines = Engines(tmp_path, 2, worker={"step_ms": 10})
    async with fleet_of(engines, fingerprint, failover=failover_s) as fleet:
        running = await some(fleet, 4, tokens=200)
        await first_tokens(running)
        engines.schedulers[0].signal(signal.SIGSTOP)  # it reads no more
        killed, before = fleet.replicas[0], len(joined)
        for in_outbox in (False, True):
            running += await some(fleet, 60, tokens=5) + await some(fleet, 60, tokens=5, streaming=False)
            if not in_outbox:
                await eventually_async(lambda: not killed.backlog)
        assert max(joined[before:]) > 1
        assert killed.backlog > 1
        lost, abandon = [], Session.abandon
        monkeypatch.setattr(Session, "abandon", lambda *how: lost.extend(found := abandon(*how)) or found)
        engines.schedulers[0].kill()
        failed = {}
        for each in running:
            try:
                await ends([each])
            except Unavailable as error:
                failed[each] = error.message
        assert failovers(fleet.metrics) == ({"lost": len(lost)} if failover_s else {})
        assert failed.keys() == (set() if failover_s else {choice.request for choice in lost})
        assert all("the scheduler was lost" in message for message in failed.values())
        answered = sum(len(each.samples) for each in running if each not in failed)
        assert sum(fleet.metrics.generation_tokens.counts) == answered


@pytest.mark.slow
async def test_schedulers_that_cannot_resume_are_not_asked_to(tmp_path, fingerprint):
    engines = Engines(tmp_path, 2, worker={"step_ms": 20})
    async with fleet_of(engines, fingerprint) as fleet:
        running = await some(fleet, 4)
        await first_tokens(running)
        old = fleet.replicas[1]
        old.model = replace(old.model, contract_version="1.4")
        engines.schedulers[0].kill()
        await eventually_async(lambda: not fleet.replicas[0].ready)
        engines.schedulers[0].start()
        await ends(running)
