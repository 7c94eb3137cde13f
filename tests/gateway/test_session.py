"""One session to a scheduler, seen from its requests."""

import asyncio

import numpy as np
import pytest
from google.rpc import status_pb2

from services.common.errors import Internal, PayloadTooLarge
from services.common.rpc.channel import MAX_PUBLIC_MESSAGE_BYTES
from services.gateway.engine import codec
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.session import MAX_BACKLOG, Session, Timings
from tokasaurus.scheduler.v1 import session_pb2


def test_a_request_that_the_scheduler_would_not_read_is_refused_here():
    """The scheduler would end the whole session over it."""
    session = Session(None, RequestMetrics(), None, Timings())
    prompt = np.zeros(MAX_PUBLIC_MESSAGE_BYTES // 4, dtype=np.uint32)
    [call] = ActiveRequest([PromptRequest("r", "m", prompt, 5, None, Settings())], streaming=False).scheduler_requests
    with pytest.raises(PayloadTooLarge):
        session.submit(call)
    assert not session._outbox
    assert not session._samples


@pytest.mark.parametrize(("now", "left_ms"), [(1_000.0, 5_000), (1_004.5, 500), (1_010.0, 0)])
def test_a_scheduler_is_told_how_much_time_is_left_since_its_clock_may_differ(now, left_ms, monkeypatch):
    monkeypatch.setattr("services.gateway.engine.codec.time.monotonic", lambda: now)
    monkeypatch.setattr("services.gateway.engine.codec.time.time", lambda: 2_000.0)
    job = PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings(deadline_ms=1_005_000))
    [call] = ActiveRequest([job], streaming=False).scheduler_requests
    request = codec.encode_submit(call.submission).submit.request
    assert (request.deadline_in_ms, request.deadline_unix_ms) == (left_ms, 2_000_000 + left_ms)


def ending() -> codec.SampleEnding:
    return codec.SampleEnding("length", False, 0, 1, 1, 0, 0.0, 0.0, 0.0, None)


async def test_streams_and_others_in_one_message_each_get_their_tokens():
    session, made = Session(None, RequestMetrics(), None, Timings()), []
    for streaming in (True, False):
        job = PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings(n=2))
        made.append(ActiveRequest([job], streaming=streaming))
        session.submit(made[-1].scheduler_requests[0])
    tokens = np.array([5, 6, 7, 8, 9, 10], np.uint32)
    step = codec.StepTokens(np.array([3, 0, 2], np.uint32), np.array([3, 2, 1], np.uint32), tokens, None, [])
    session._on_outputs(step)
    last = codec.StepTokens(np.array([2, 3, 1], np.uint32), None, tokens[:3], None, [(2, ending()), (3, ending())])
    session._on_outputs(last)
    streamed, whole = made
    assert [choice.take()[0] for choice in await streamed.wait_updated()] == [[5 + 3, 5 + 4], [7]]
    assert [choice.take()[0].tolist() for choice in await whole.wait_ended()] == [[10, 5], [5, 6, 7, 6]]
    assert session._metrics.inter_token.counts != [0] * len(session._metrics.inter_token.counts)
    assert streamed.first_token_at is not None
    assert whole.first_token_at is not None


async def test_what_a_cancelled_sample_still_gets_is_thrown_away():
    session = Session(None, RequestMetrics(), None, Timings())
    running = ActiveRequest([PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings())], streaming=False)
    session.submit(running.scheduler_requests[0])
    running.close()
    one = np.array([0], np.uint32)
    session._on_outputs(codec.StepTokens(one, None, one, None, [(0, ending())]))
    assert not session._samples
    assert not session._slots.taken.any()


async def test_a_sample_that_ended_by_itself_is_not_cancelled_any_more():
    """Its handle may be another's by the time the cancel is sent."""
    session = Session(None, RequestMetrics(), None, Timings())
    first, second = (
        ActiveRequest([PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings(n=2))], streaming=False)
        for _ in "ab"
    )
    session.submit(first.scheduler_requests[0])
    first.close()
    nothing = np.array([], np.uint32)
    session._on_outputs(codec.StepTokens(nothing, None, nothing, None, [(0, ending())]))
    assert list(session._cancels) == [1]
    session.submit(second.scheduler_requests[0])
    second.close()
    session._on_rejection(session_pb2.Rejection(handle=2))
    assert list(session._cancels) == [1]


@pytest.mark.parametrize("broken", ["add_prompt_scores", "add_tokens", "finish", "on_accepted", "refused"])
async def test_a_request_that_something_unforeseen_happens_to_ends_alone(broken, monkeypatch):
    class Owner:
        """Hands a request that is refused to its generation, which may be broken."""

        def refused(self, call, error) -> None:
            call.parent.refused(error)

    def fails(*_) -> None:
        raise ValueError("cursed")

    session, made = Session(None, RequestMetrics(), Owner(), Timings()), []
    for _ in range(3):
        made.append(
            ActiveRequest([PromptRequest("r", "m", np.array([1, 2], np.uint32), 5, None, Settings())], streaming=True)
        )
        session.submit(made[-1].scheduler_requests[0])
    first, cursed, last = made
    monkeypatch.setattr(cursed, broken, fails, raising=False)
    for handle in range(3):
        if broken == "refused" and handle == 1:
            session._on_rejection(session_pb2.Rejection(handle=handle, status=status_pb2.Status(code=3)))
        else:
            session._on_acceptance(handle)
    all_of_them = np.arange(3, dtype=np.uint32)
    scores = codec.PromptScores(1, np.ones(1, np.float32), all_of_them[:0], all_of_them[:0], np.zeros(0, np.float32))
    here = all_of_them if broken != "refused" else all_of_them[[0, 2]]
    session._on_outputs(codec.StepTokens(here, None, here, None, [], [(handle, scores) for handle in here.tolist()]))
    endings = [(handle, ending()) for handle in here.tolist()]
    session._on_outputs(codec.StepTokens(here, None, here, None, endings))
    for running, token in ((first, 0), (last, 2)):
        [choice] = await running.wait_updated()
        assert (choice.take()[0], choice.ending, running._error) == ([token, token], ending(), None)
    assert isinstance(cursed._error, Internal)
    assert not session._samples


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
