"""Session: many requests on one stream."""

import random

import grpc
import pytest

from services.common.errors import Overloaded
from services.scheduler.api.mailbox import Mailbox
from tests.fakes.model import FakeShape, chosen_logprob, continuation
from tests.scheduler.service import PROMPT, session, start
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import session_pb2


def request(seed: int = 3, most: int = 10, prompt=PROMPT, **fields) -> dict:
    return {
        "tokens": g.TokenPrompt(token_ids=prompt),
        "sampling": g.Sampling(seed=seed),
        "stopping": g.Stopping(max_tokens=most),
        **fields,
    }


async def test_a_session_says_what_it_serves(service):
    async with session(service) as client:
        assert client.opened.scheduler_id == service.server.scheduler_id
        assert client.opened.model.vocab_size == 2048


async def test_many_requests_share_one_stream(service):
    async with session(service) as client:
        for handle in range(0, 200, 2):
            await client.submit(handle, **request(seed=handle, n=2, prompt=PROMPT[: 1 + handle % 43]))
        await client.finished(*range(200))
        for handle in range(200):
            first = handle - handle % 2
            expected = continuation(
                service.worker.shape, PROMPT[: 1 + first % 43], 10, seed=first, sample_index=handle % 2
            )
            assert client.samples[handle].tokens == expected


def submit(handle: int, **fields) -> session_pb2.Submit:
    return session_pb2.Submit(handle=handle, request=g.GenerateRequest(**request(seed=handle, **fields)))


async def test_requests_in_one_message_have_the_same_effect_as_one_message_each(service):
    async with session(service) as client:
        requests = [submit(handle) for handle in range(99)]
        requests.insert(50, submit(200, model="gpt-9"))
        await client.send(submits=session_pb2.Submits(submits=requests))
        await client.send(cancel=session_pb2.Cancel(handles=[98, 200]))
        await client.finished(*range(99))
        assert list(client.accepted) == list(range(99))
        assert list(client.rejected) == [200]
        for handle in range(98):
            expected = continuation(service.worker.shape, PROMPT, 10, seed=handle, sample_index=0)
            assert client.samples[handle].tokens == expected


@pytest.mark.parametrize("together", [False, True])
async def test_acceptances_share_a_message_only_after_requests_did(service, together):
    kinds = []
    async with session(service) as client:
        if together:
            await client.send(submits=session_pb2.Submits(submits=[submit(handle) for handle in range(50)]))
        else:
            for handle in range(50):
                await client.submit(handle, **request(seed=handle))
        while len(client.accepted) < 50:
            kinds.append((await client.read()).WhichOneof("payload"))
        await client.finished(*range(50))
    assert ("acceptances" in kinds) is together


async def test_a_message_with_too_many_requests_ends_the_session(service):
    async with session(service) as client:
        await client.send(submits=session_pb2.Submits(submits=[session_pb2.Submit()] * 1025))
        with pytest.raises(grpc.aio.AioRpcError, match="expected at most 1024") as ended:
            await client.finished(0)
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_heartbeat_counts_messages_and_not_the_requests_in_them(service):
    async with session(service) as client:
        await client.send(submits=session_pb2.Submits(submits=[submit(handle) for handle in range(5)]))
        await client.send(heartbeat=session_pb2.Heartbeat(nonce=7, messages_before=2))
        await client.finished(*range(5))


async def test_a_second_request_with_the_same_prefix_prefills_only_the_rest(service):
    async with session(service) as client:
        await client.submit(0, **request())
        await client.finished(0)
        before = service.worker.model.prefilled_tokens
        await client.submit(1, **request(prompt=[*PROMPT, 99]))
        await client.finished(1)
        assert service.worker.model.prefilled_tokens - before == 44 - 32
        assert client.samples[1].finish.usage.cached_prompt_tokens == 32


async def test_a_cancel_ends_each_sample_once_and_unknown_handles_are_passed_over(service):
    service.worker.hold()
    async with session(service) as client:
        await client.submit(5, **request(n=3))
        await client.send(cancel=session_pb2.Cancel(handles=[6, 77]))
        await client.finished(6)
        assert client.samples[6].finish.reason == g.FINISH_REASON_CANCELLED
        service.worker.release()
        await client.finished(5, 7)
        assert client.samples[7].tokens == continuation(service.worker.shape, PROMPT, 10, seed=3, sample_index=2)


async def test_a_cancelled_prefill_frees_its_pages():
    async with start(FakeShape(max_tokens_per_step=16)) as service:
        service.worker.hold()
        async with session(service) as client:
            await client.submit(0, **request(prompt=list(range(100, 400))))
            await service.worker.received(1)
            await client.send(cancel=session_pb2.Cancel(handles=[0]))
            await client.finished(0)
            assert (await service.load()).in_use_pages == 0
            service.worker.release()
            await client.submit(1, **request())
            await client.finished(1)
            assert client.samples[1].tokens == continuation(service.worker.shape, PROMPT, 10, seed=3)


async def test_losing_the_stream_cancels_its_requests_and_no_others(service):
    service.worker.hold()
    async with session(service) as other:
        await other.submit(0, **request())
        await other.decided(0)
        async with session(service) as client:
            await client.submit(0, **request(n=50, seed=8))
            await client.decided(0)
        load = await service.until_load(lambda load: load.running_sequences + load.waiting_sequences == 1)
        assert load.counters.sequences_cancelled == 50
        service.worker.release()
        await other.finished(0)
        assert other.samples[0].tokens == continuation(service.worker.shape, PROMPT, 10, seed=3)


async def test_a_client_that_sends_no_more_still_gets_everything(service):
    call = service.stub.Session()
    async with session(service):
        pass
    await call.write(session_pb2.SessionRequest(open=session_pb2.SessionOpen()))
    submit = session_pb2.Submit(handle=1, request=g.GenerateRequest(**request()))
    await call.write(session_pb2.SessionRequest(submit=submit))
    await call.done_writing()
    tokens = []
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.outputs.token_ids
    assert tokens == continuation(service.worker.shape, PROMPT, 10, seed=3)
    assert await call.code() == grpc.StatusCode.OK


async def test_logprobs_of_some_leave_gaps_for_the_others(service):
    async with session(service) as client:
        await client.submit(0, **request(output=g.Output(logprobs=True)))
        await client.submit(1, **request(seed=4))
        await client.finished(0, 1)
        sample = client.samples[0]
        assert sample.chosen == pytest.approx(chosen_logprob(sample.tokens).tolist())
        assert all(value != value for value in client.samples[1].chosen)


async def test_the_step_loop_answers_heartbeats_and_pushes_loads(service):
    async with session(service) as client:
        await client.send(heartbeat=session_pb2.Heartbeat(nonce=77))
        answer = await client.until(lambda message: message.HasField("heartbeat"))
        assert answer.heartbeat.nonce == 77
        await client.submit(0, **request())
        await client.until(lambda message: message.load.counters.sequences_finished == 1)
        assert client.loads[-1].ready
        assert client.loads[-1].running_sequences == 0


async def test_a_handle_in_use_and_an_unknown_model_are_rejected(service):
    service.worker.hold()
    async with session(service) as client:
        await client.submit(1, **request(n=4))
        await client.submit(4, **request())
        await client.submit(9, **request(model="gpt-9"))
        await client.submit(10, **request(output=g.Output(text=True)))
        await client.decided(10)
        assert client.rejected[4].code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        assert client.rejected[9].code == grpc.StatusCode.NOT_FOUND.value[0]
        assert "text" in client.rejected[10].message
        service.worker.release()
        await client.finished(1, 2, 3, 4)


async def test_a_request_that_cannot_be_read_for_our_own_fault_does_not_end_the_session(service, monkeypatch):
    async def broken(*_):
        raise RuntimeError("boom")

    async with session(service) as client:
        monkeypatch.setattr("services.scheduler.api.validation.read_prompt", broken)
        await client.submit(0, **request())
        await client.decided(0)
        assert client.rejected[0].code == grpc.StatusCode.INTERNAL.value[0]
        assert "boom" not in client.rejected[0].message
        monkeypatch.undo()
        await client.submit(1, **request())
        await client.finished(1)


async def test_the_first_message_must_open_the_session(service):
    call = service.stub.Session()
    await call.write(session_pb2.SessionRequest(heartbeat=session_pb2.Heartbeat(nonce=1)))
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
async def test_a_reader_that_never_reads_is_given_up(service, monkeypatch):
    monkeypatch.setattr("services.scheduler.api.mailbox._MOST_BYTES", 100_000)
    async with session(service) as client:
        output = g.Output(logprobs=True, top_logprobs=20)
        for handle in range(0, 800, 8):
            await client.submit(handle, **request(most=2000, n=8, prompt=[50], output=output))
        # gRPC accepts what fits its windows; behind that the mailbox fills and the stream ends.
        while (await service.load()).counters.sequences_finished < 800:
            pass
        assert (await service.load()).counters.sequences_cancelled > 700
        with pytest.raises(grpc.aio.AioRpcError, match="reads too slowly"):
            await client.until(lambda message: False)
        assert await client.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_requests_of_a_client_that_falls_silent_end(service, monkeypatch):
    monkeypatch.setattr("services.scheduler.api.session._HEARTBEAT_TIMEOUT_S", 1)
    service.worker.hold()
    async with session(service) as never_beats, session(service) as client:
        await never_beats.submit(0, **request())
        await never_beats.decided(0)
        await client.submit(0, **request(n=5))
        await client.send(heartbeat=session_pb2.Heartbeat(nonce=1))
        await client.decided(0)
        with pytest.raises(grpc.aio.AioRpcError, match="has sent no message for"):
            await client.until(lambda message: False)
        assert await client.call.code() == grpc.StatusCode.UNAVAILABLE
        load = await service.load()
        assert (load.running_sequences + load.waiting_sequences, load.counters.sequences_cancelled) == (1, 5)
        service.worker.release()
        await never_beats.finished(0)


async def test_a_mailbox_that_overflowed_says_so():
    told = []
    mailbox = Mailbox(lambda: told.append(True), most_bytes=100)
    mailbox.put(session_pb2.Heartbeat(nonce=1))
    mailbox.put(session_pb2.Heartbeat(nonce=2))
    mailbox.put(session_pb2.Heartbeat(nonce=3))
    assert told == [True]
    with pytest.raises(Overloaded, match="too slowly"):
        await mailbox.get()


async def test_a_session_that_pauses_for_the_step_loop_loses_nothing(service, monkeypatch):
    monkeypatch.setattr("services.scheduler.api.session._MOST_BACKLOG", -1)
    async with session(service) as client:
        for handle in range(50):
            await client.submit(handle, **request(most=3))
        await client.send(cancel=session_pb2.Cancel(handles=[49]))
        await client.finished(*range(50))
        assert client.accepted.keys() == set(range(50))


async def test_a_slow_reader_gets_everything_in_fewer_messages(service):
    async with session(service) as client:
        await client.submit(0, **request(most=400, n=20, prompt=[50]))
        await client.decided(0)
        await service.worker.received(390)
        await client.finished(*range(20))
        for handle in range(20):
            assert client.samples[handle].tokens == continuation(
                service.worker.shape, [50], 400, seed=3, sample_index=handle
            )


async def test_a_full_queue_says_when_to_come_back():
    async with start(FakeShape(max_slots=1), max_queued_sequences=10) as service:
        service.worker.hold()
        async with session(service) as client:
            await client.submit(0, **request(n=10))
            await client.submit(20, **request(n=10))
            await client.decided(20)
            status = client.rejected[20]
            assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert any("RetryInfo" in detail.type_url for detail in status.details)


@pytest.mark.slow
async def test_random_operations_leave_nothing_behind():
    shape = FakeShape(page_count=120, max_slots=24, max_tokens_per_step=64, eos_every=40)
    chance = random.Random(5)
    async with start(shape) as service:
        for _ in range(3):
            async with session(service) as client:
                for handle in range(0, 400, 4):
                    prompt = [*PROMPT[: chance.randrange(40)], chance.randrange(20, 900)]
                    await client.submit(handle, **request(seed=handle, most=chance.randrange(1, 60), prompt=prompt,
                                                          n=chance.randrange(1, 5)))  # fmt: skip
                    if chance.random() < 0.3:
                        await client.send(cancel=session_pb2.Cancel(handles=[chance.randrange(handle + 4)]))
                    if chance.random() < 0.02:
                        service.worker.crash()
                for _ in range(chance.randrange(5, 200)):
                    await client.read()
        load = await service.until_load(lambda load: load.running_sequences + load.waiting_sequences == 0)
        assert load.in_use_pages == 0
        assert load.counters.preemptions == 0
