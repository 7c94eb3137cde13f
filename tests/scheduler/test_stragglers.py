"""Stragglers of Generate and Session, End, Park, and the forecast of a group."""

import pytest

from tests.fakes.model import FakeShape
from tests.scheduler.service import PROMPT, Client, Service, session, start
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2 as o
from tokasaurus.scheduler.v1 import session_pb2 as s

SHAPE = FakeShape(max_slots=2)


def fields(max_tokens: int, **stopping) -> dict:
    stop = g.Stopping(max_tokens=max_tokens, ignore_eos=True, **stopping)
    return {"tokens": g.TokenPrompt(token_ids=PROMPT), "stopping": stop, "sampling": g.Sampling(seed=3)}


async def taken(client: Client) -> None:
    """Wait until the step loop has taken all messages of the session."""
    await client.send(heartbeat=s.Heartbeat(nonce=1))
    await client.until(lambda message: message.HasField("heartbeat"))


@pytest.mark.parametrize("text", [False, True])
async def test_the_rest_of_a_group_ends_when_enough_samples_have_finished(text):
    async with start(SHAPE) as service:
        whole = await service.generate(n=6, output=g.Output(text=text), **fields(20))
        samples = await service.generate(
            n=6, output=g.Output(text=text), stragglers=g.Stragglers(end_after=2, park_after=1), **fields(20)
        )
        assert [samples[index].finish.reason for index in range(6)] == [
            *[g.FINISH_REASON_LENGTH] * 2,
            *[g.FINISH_REASON_ABORTED] * 4,
        ]
        for index in range(6):
            sample = samples[index]
            assert sample.tokens == whole[index].tokens[: len(sample.tokens)]
            assert whole[index].text.startswith(sample.text)
            assert sample.finish.usage.completion_tokens == len(sample.tokens)
            assert not sample.finish.HasField("error")


async def test_a_sample_that_ends_at_a_stop_string_has_finished():
    async with start(SHAPE) as service:
        whole = await service.generate(n=2, output=g.Output(text=True), **fields(60))
        words = (word for word in whole[0].text.split() if word.isascii() and word not in whole[1].text)
        stop = next(words)
        samples = await service.generate(
            n=2, output=g.Output(text=True), stragglers=g.Stragglers(end_after=1), **fields(60, strings=[stop])
        )
        assert samples[0].finish.WhichOneof("stopped_by") == "stop_string"
        assert samples[1].finish.reason == g.FINISH_REASON_ABORTED


async def test_a_session_ends_the_rest_of_a_group():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, n=4, **fields(10))
        await client.submit(9, **fields(10))
        await client.send(end=s.End(handles=[1, 3, 77]))
        await taken(client)
        service.worker.release()
        await client.finished(0, 1, 2, 3, 9)
        ended = {h for h in (0, 1, 2, 3, 9) if client.samples[h].finish.reason == g.FINISH_REASON_ABORTED}
        assert ended == {1, 3}


async def hold_parked_group(service: Service, client: Client) -> None:
    """Park two samples that have tokens and all slots, and submit another request."""
    service.worker.hold()
    await client.submit(0, n=2, **fields(200))
    service.worker.release(plans=6)
    await client.until(lambda _: len(client.samples[1].tokens) >= 2)
    await client.send(park=s.Park(handles=[0, 77]))
    await client.submit(9, priority=g.PRIORITY_CLASS_LOW, **fields(3))
    await taken(client)


async def test_a_parked_group_leaves_its_slots_to_others_and_finishes_later():
    async with start(SHAPE) as service, session(service) as client:
        alone = (await service.generate(n=2, **fields(200)))[1].tokens
        await hold_parked_group(service, client)
        service.worker.release(plans=40)  # 16 may be in flight
        await client.finished(9)
        service.worker.release()
        await client.finished(0, 1)
        assert client.samples[1].tokens == alone
        load = await service.load()
        assert (load.counters.yields, load.parked_sequences) == (1, 0)


async def test_a_load_shows_parked_samples_apart():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, n=5, **fields(20))
        await client.send(park=s.Park(handles=[0]))
        await taken(client)
        load = await service.load()
        assert (load.waiting_sequences, load.outstanding_tokens) == (0, 0)
        assert load.parked_sequences == 5 - load.running_sequences
        service.worker.release()
        await client.finished(0, 1, 2, 3, 4)


async def test_a_forecast_has_the_end_of_each_sample():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, n=5, request_id="group", **fields(20))
        await client.decided(0)
        asked = o.ForecastRequest(request_id="group")
        before = await service.stub.Forecast(asked)
        assert len(before.sample_finish_steps) == 5
        assert list(before.sample_finish_steps) == sorted(before.sample_finish_steps)
        assert before.sample_finish_steps[-1] == before.finish_step
        assert before.sample_finish_steps[1] < before.sample_finish_steps[2]  # two slots
        service.worker.release(plans=24)
        await client.finished(0, 1)
        after = await service.stub.Forecast(asked)
        assert list(after.sample_finish_steps[:2]) == [0, 0]
        assert all(after.sample_finish_steps[2:])
        assert after.finish_seconds == pytest.approx(after.finish_step * after.step_seconds)
        service.worker.release()
        await client.finished(2, 3, 4)
        possible = o.ForecastRequest(request=g.GenerateRequest(n=3, **fields(20)))
        assert len((await service.stub.Forecast(possible)).sample_finish_steps) == 3
