"""One session to a scheduler, seen from its requests."""

import asyncio
from itertools import chain

import numpy as np
import pytest

from services.common.errors import Internal, InvalidRequest, Overloaded, PayloadTooLarge
from services.common.rpc.channel import MAX_PUBLIC_MESSAGE_BYTES
from services.gateway.engine import codec
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.session import MAX_BACKLOG, Session, Timings
from tests.gateway.scheduler_end import SchedulerEnd, error_of, finish
from tokasaurus.scheduler.v1 import generate_pb2, session_pb2


async def test_a_request_that_the_scheduler_would_not_read_is_refused_here():
    """The scheduler would end the whole session over it."""
    session = Session(None, RequestMetrics(), None, Timings())
    prompt = np.zeros(MAX_PUBLIC_MESSAGE_BYTES // 4, dtype=np.uint32)
    [call] = ActiveRequest([PromptRequest("r", "m", prompt, 5, None, Settings())], streaming=False).scheduler_requests
    with pytest.raises(PayloadTooLarge):
        session.submit(call)
    assert session.backlog == 0
    assert not session.abandon()


@pytest.mark.parametrize(("now", "left_ms"), [(1_000.0, 5_000), (1_004.5, 500), (1_010.0, 0)])
def test_a_scheduler_is_told_how_much_time_is_left_since_its_clock_may_differ(now, left_ms, monkeypatch):
    monkeypatch.setattr("services.gateway.engine.codec.time.monotonic", lambda: now)
    monkeypatch.setattr("services.gateway.engine.codec.time.time", lambda: 2_000.0)
    job = PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings(deadline_ms=1_005_000))
    [call] = ActiveRequest([job], streaming=False).scheduler_requests
    request = codec.encode_submit(call.submission).submit.request
    assert (request.deadline_in_ms, request.deadline_unix_ms) == (left_ms, 2_000_000 + left_ms)


def whole_session(end: SchedulerEnd) -> int:
    """The first handle of a request of as many samples as a session has at first: 0 if none of them is taken."""
    job = PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings(n=16_384))
    [call] = ActiveRequest([job], streaming=False).scheduler_requests
    end.session.submit(call)
    return call.handle


async def test_streams_and_others_in_one_message_each_get_their_tokens():
    end, made = SchedulerEnd(), []
    for streaming in (True, False):
        job = PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings(n=2))
        made.append(ActiveRequest([job], streaming=streaming))
        end.session.submit(made[-1].scheduler_requests[0])
    await end.outputs(handles=[3, 0, 2], token_counts=[3, 2, 1], token_ids=[5, 6, 7, 8, 9, 10])
    await end.outputs(handles=[2, 3, 1], token_ids=[5, 6, 7], finished={2: finish(), 3: finish()})
    streamed, whole = made
    assert [choice.take()[0] for choice in await streamed.wait_updated()] == [[5 + 3, 5 + 4], [7]]
    assert [choice.take()[0].tolist() for choice in await whole.wait_ended()] == [[10, 5], [5, 6, 7, 6]]
    assert any(end.metrics.inter_token.counts)
    assert streamed.first_token_at is not None
    assert whole.first_token_at is not None


async def test_first_tokens_run_before_the_tokens_of_other_streams():
    end, order, streams = SchedulerEnd(), [], []
    for _ in range(3):
        job = PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings())
        streams.append(ActiveRequest([job], streaming=True))
        end.session.submit(streams[-1].scheduler_requests[0])

    async def read(handle: int) -> None:
        await streams[handle].wait_updated()
        order.append(handle)

    for handles in ([0, 1], [0, 1, 2]):
        readers = [asyncio.create_task(read(handle)) for handle in handles]
        await asyncio.sleep(0)  # the readers wait now
        await end.outputs(handles=handles, token_ids=[7] * len(handles))
        await asyncio.gather(*readers)
        for handle in handles:
            streams[handle].samples[0].take()
    assert order == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("counts", [(1, 3, 2), (5, 7, 3)])
async def test_several_tokens_of_each_sample_in_a_message_are_each_its_own(counts):
    end = SchedulerEnd()
    job = PromptRequest("r", "m", np.array([1], np.uint32), 50, None, Settings(n=3))
    running = ActiveRequest([job], streaming=False)
    end.session.submit(running.scheduler_requests[0])
    tokens = [[10 * (sample + 1) + place for place in range(count)] for sample, count in enumerate(counts)]
    finished = {sample: finish(count) for sample, count in enumerate(counts)}
    await end.outputs(handles=[0, 1, 2], token_counts=counts, token_ids=chain(*tokens), finished=finished)
    assert [choice.take()[0].tolist() for choice in await running.wait_ended()] == tokens


async def test_what_a_cancelled_sample_still_gets_is_thrown_away():
    end = SchedulerEnd()
    running = ActiveRequest([PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings())], streaming=False)
    end.session.submit(running.scheduler_requests[0])
    running.close()
    await end.outputs(handles=[0], token_ids=[0], finished={0: finish()})
    assert not end.session.abandon()
    assert whole_session(end) == 0


async def test_a_sample_that_ended_by_itself_is_not_cancelled_any_more():
    """Its handle may be another's by the time the cancel is sent."""
    end = SchedulerEnd()
    first, second = (
        ActiveRequest([PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings(n=2))], streaming=False)
        for _ in "ab"
    )
    end.session.submit(first.scheduler_requests[0])
    first.close()
    await end.outputs(finished={0: finish()})
    assert end.cancelled == [1]
    end.session.submit(second.scheduler_requests[0])
    second.close()
    await end.reject(2, Overloaded("full", retry_after_s=1.0))
    assert end.cancelled == [1]


@pytest.mark.parametrize("broken", ["add_prompt_scores", "add_tokens", "finish", "on_accepted", "refused"])
async def test_a_request_that_something_unforeseen_happens_to_ends_alone(broken, monkeypatch):
    class Owner:
        """Hands a request that is refused to its generation, which may be broken."""

        def refused(self, call, error) -> None:
            call.parent.refused(error)

    def fails(*_) -> None:
        raise ValueError("cursed")

    end, made = SchedulerEnd(Owner()), []
    for _ in range(3):
        made.append(
            ActiveRequest([PromptRequest("r", "m", np.array([1, 2], np.uint32), 5, None, Settings())], streaming=True)
        )
        end.session.submit(made[-1].scheduler_requests[0])
    first, cursed, last = made
    monkeypatch.setattr(cursed, broken, fails, raising=False)
    for handle in range(3):
        if broken == "refused" and handle == 1:
            await end.reject(handle, InvalidRequest("not so"))
        else:
            await end.accept(handle)
    here = [0, 1, 2] if broken != "refused" else [0, 2]
    scores = generate_pb2.PromptLogprobs(start=1, logprobs=generate_pb2.Logprobs(chosen=[1.0]))
    prompts = [session_pb2.PromptScores(handle=handle, logprobs=scores) for handle in here]
    await end.outputs(handles=here, token_ids=here, prompts=prompts)
    await end.outputs(handles=here, token_ids=here, finished=dict.fromkeys(here, finish()))
    for running, token in ((first, 0), (last, 2)):
        [choice] = await running.wait_updated()
        assert (choice.take()[0], choice.ending.reason, error_of(running)) == ([token, token], "length", None)
    assert isinstance(error_of(cursed), Internal)
    assert whole_session(end) == 0


class Stream:
    """Takes one message, and another whenever ``room`` is given."""

    def __init__(self) -> None:
        self.messages: list[session_pb2.SessionRequest] = []
        self.written: list[str] = []
        self.full, self.room = asyncio.Event(), asyncio.Semaphore(0)

    async def read(self) -> None:
        await asyncio.Event().wait()

    async def write(self, message) -> None:
        self.messages.append(message)
        self.written.append(message.WhichOneof("payload"))
        self.full.set()
        await self.room.acquire()


async def test_a_heartbeat_does_not_wait_behind_thousands_of_requests():
    """The scheduler would count as hung."""
    stream = Stream()
    session = Session(stream, RequestMetrics(), None, Timings())
    jobs = [PromptRequest(f"r-{n}", "m", np.array([1], np.uint32), 5, None, Settings()) for n in range(1000)]
    for call in ActiveRequest(jobs, streaming=False).scheduler_requests:
        session.submit(call)
    serving = asyncio.create_task(session.run())
    await stream.full.wait()
    stream.full.clear()
    stream.room.release()
    await stream.full.wait()
    serving.cancel()
    assert stream.written == ["submit", "heartbeat"]


@pytest.mark.parametrize("takes_submits", [False, True])
async def test_short_requests_share_messages_if_the_scheduler_accepts_that(takes_submits):
    stream = Stream()
    session = Session(stream, RequestMetrics(), None, Timings(), takes_submits=takes_submits)
    lengths = [1] * 300 + [100_000] + [1] * 10
    jobs = [
        PromptRequest(f"r-{n}", "m", np.ones(length, np.uint32), 5, None, Settings())
        for n, length in enumerate(lengths)
    ]
    for call in ActiveRequest(jobs, streaming=False).scheduler_requests:
        session.submit(call)
    for _ in jobs:
        stream.room.release()
    serving = asyncio.create_task(session.run())
    sent: list[session_pb2.Submit] = []
    while len(sent) < len(jobs):
        await stream.full.wait()
        stream.full.clear()
        sent = [
            each
            for message in stream.messages
            for each in ([message.submit] if message.HasField("submit") else message.submits.submits)
        ]
    serving.cancel()
    assert [(each.handle, each.request.request_id) for each in sent] == [(n, f"r-{n}") for n in range(len(jobs))]
    assert ("submits" in stream.written) is takes_submits
    requests = [message for message in stream.messages if not message.HasField("heartbeat")]
    assert len(requests) < 20 if takes_submits else len(requests) == len(jobs)


@pytest.mark.parametrize(("version", "takes"), [("1.10", False), ("1.11", True), ("1.12", True), ("1", False)])
def test_a_scheduler_of_an_older_contract_gets_one_request_in_a_message(version, takes):
    assert codec.ModelFacts("m", 0, 2048, 2048, True, 20, "", version).takes_submits is takes


async def test_acceptances_in_one_message_reach_each_request():
    class Accepting(Stream):
        async def read(self) -> session_pb2.SessionResponse:
            if not self.messages:
                acceptances = [session_pb2.Acceptance(handle=handle) for handle in range(3)]
                self.messages.append(session_pb2.SessionRequest())
                return session_pb2.SessionResponse(acceptances=session_pb2.Acceptances(acceptances=acceptances))
            return await asyncio.Event().wait()

    session = Session(Accepting(), RequestMetrics(), None, Timings(), takes_submits=True)
    jobs = [PromptRequest(f"r-{n}", "m", np.array([1], np.uint32), 5, None, Settings()) for n in range(3)]
    generation = ActiveRequest(jobs, streaming=True)
    for call in generation.scheduler_requests:
        session.submit(call)
    serving = asyncio.create_task(session.run())
    await generation.wait_accepted()
    serving.cancel()


@pytest.mark.parametrize("ends", [False, True])
async def test_who_has_many_requests_waits_until_a_session_has_room_or_has_ended(ends):
    stream = Stream()
    session = Session(stream, RequestMetrics(), None, Timings())
    jobs = [
        PromptRequest(f"r-{n}", "m", np.array([1], np.uint32), 5, None, Settings()) for n in range(MAX_BACKLOG + 20)
    ]
    for call in ActiveRequest(jobs, streaming=False).scheduler_requests:
        session.submit(call)
    serving = asyncio.create_task(session.run())
    waiting = asyncio.create_task(session.room())
    await stream.full.wait()
    assert not waiting.done()
    if ends:
        serving.cancel()
    else:
        for _ in jobs:
            stream.room.release()
    await waiting
    assert (session.backlog <= MAX_BACKLOG) is not ends
    serving.cancel()
