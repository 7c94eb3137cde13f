"""The step loop with a worker and clients that live inside its own turns: no clock, no other thread but its own."""

import threading
import time
from collections import Counter, deque

import numpy as np
import pytest

from services.common.plan.codec import decode_result
from services.common.plan.types import SamplingSettings
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine import loop, planning
from services.scheduler.engine.events import Accepted, Rejected
from services.scheduler.engine.inbox import MOST_SUBMITTED, Inbox
from services.scheduler.engine.loop import EngineLoop
from services.scheduler.engine.step_timeout import StepTimeout
from services.scheduler.workers.stream import ReceivedResult
from tests.fakes.model import FakeModel, FakeShape
from tokasaurus.scheduler.v1 import session_pb2
from tokasaurus.worker.v1 import plan_pb2

SINK = 1
SHAPE = FakeShape(vocab_size=62, max_slots=4096, page_count=16384, max_tokens_per_step=8192, first_token=2)


class Worker:
    """In place of a WorkerStream: notes how many requests had been accepted when each plan came."""

    plans_in_flight = 2
    info = SHAPE.worker_info()
    weights_version = ""
    is_asleep = bool  # false

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self.model = FakeModel(SHAPE)
        self._answers: deque = deque()
        self.accepted_before: list[int] = []
        self.loop: EngineLoop

    def send(self, plan) -> None:
        self.accepted_before.append(self._core.state.queue.counters.requests_accepted)
        self._answers.append(self.model.apply(plan))

    def answer(self) -> None:
        """The oldest plan in flight, if there is one."""
        if self._answers:
            message = self._answers.popleft()
            self.loop.worker_result(self, ReceivedResult(decode_result(message), message, time.monotonic()))


class Bench:
    """A loop that is not started yet, so that what it finds is known."""

    def __init__(self) -> None:
        self.core = Scheduler([b"a"] * SHAPE.vocab_size, SHAPE.vocab_size, Policy())
        self.worker = Worker(self.core)
        self.news: list = []
        self.failures: list = []
        self._wanted = lambda: False
        self._seen = threading.Event()
        self.loop = self.worker.loop = EngineLoop(self.core, 2048, self._deliver, self.failures.append)
        self.loop.ask(lambda core: core.open_sink(SINK))

    def submit(self, handle: int, max_tokens: int = 40, n: int = 1) -> None:
        request = Request(f"r{handle}", np.array([2 + handle % 50, 3, 4], np.uint32), SamplingSettings(), max_tokens)
        request.sink, request.handle, request.n = SINK, handle, n
        self.loop.submit(request)

    def run_until(self, wanted) -> None:
        """Start, and stop when ``wanted()``, which is asked on the loop's thread behind every turn with news."""
        self._wanted = wanted
        self.loop.start()
        assert self._seen.wait(30)
        self.loop.stop()
        assert self.failures == []

    def told(self, kind: type) -> list:
        return [item for sink, item in self.news if sink == SINK and isinstance(item, kind)]

    def finished(self) -> dict[int, FinishReason]:
        deltas = [item for sink, item in self.news if sink == SINK and hasattr(item, "finished")]
        return {finish.handle: finish.reason for delta in deltas for finish in delta.finished}

    def _deliver(self, news: list) -> None:
        self.news += news
        if self._wanted():
            self._seen.set()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_plans_go_out_between_submissions_and_not_behind_all_of_them(bench, monkeypatch):
    send = bench.worker.send
    monkeypatch.setattr(bench.worker, "send", lambda plan: (send(plan), bench.worker.answer()))  # a step takes no time
    bench.loop.worker_connected(bench.worker)
    for handle in range(3000):
        bench.submit(handle)
    bench.run_until(lambda: len(bench.told(Accepted)) == 3000)
    steps = np.diff(bench.worker.accepted_before, prepend=0)
    assert steps.max() <= MOST_SUBMITTED
    assert len(steps) >= 3000 / MOST_SUBMITTED


def test_an_answer_that_comes_among_submissions_is_followed_by_a_plan(bench, monkeypatch):
    submit, answered_at = bench.core.submit, []

    def answering(request, now_ns):
        submit(request, now_ns)
        accepted = bench.core.state.queue.counters.requests_accepted
        if accepted >= 150 and accepted % 50 == 0:
            answered_at.append(accepted)
            bench.worker.answer()

    monkeypatch.setattr(planning, "SENDING_S", 0.0)
    monkeypatch.setattr(bench.core, "submit", answering)
    bench.loop.worker_connected(bench.worker)
    for handle in range(2000):
        bench.submit(handle)
    bench.run_until(lambda: len(bench.told(Accepted)) == 2000)
    plans = bench.worker.accepted_before[2:]  # two were in flight before the first answer
    assert len(answered_at) == 38
    waited = np.array(plans[:37]) - answered_at[:37]
    assert (waited >= 0).all()
    assert (waited < MOST_SUBMITTED).all()


def test_plans_of_short_steps_that_come_late_are_sent_together(bench, monkeypatch):
    """The results of two steps that only decode are then returned together."""
    plans = []
    late = {"device_ns": 500_000, "idle_ns": 1_000_000}

    def answer(plan):
        plans.append(plan)
        result = bench.worker.model.apply(plan)
        result.timing.CopyFrom(plan_pb2.StepTiming(**late))
        bench.loop.worker_result(bench.worker, ReceivedResult(decode_result(result), result, time.monotonic()))

    monkeypatch.setattr(bench.worker, "send", answer)
    monkeypatch.setattr(bench.worker, "plans_in_flight", 16)
    bench.loop.worker_connected(bench.worker)
    for handle in range(5):
        bench.submit(handle, max_tokens=60 * (handle + 1))
    bench.run_until(lambda: len(bench.finished()) == 5)
    with_next = [plan.result_with_next for plan in plans]
    prefills = [bool(plan.admissions) for plan in plans]
    assert sum(with_next) > len(plans) // 2
    assert not any(
        held and (prefill or more)
        for held, prefill, more in zip(with_next, prefills, [*prefills[1:], True], strict=True)
    )


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 2), (3600.0, 1)])
def test_the_next_plan_is_built_after_one_with_prompts_was_sent(bench, monkeypatch, seconds, most):
    send, in_flight = bench.worker.send, []

    def note(plan):
        send(plan)
        in_flight.append(bench.core.plans_in_flight)
        bench.loop.post(bench.worker.answer)

    monkeypatch.setattr(planning, "SENDING_S", seconds)
    monkeypatch.setattr(bench.worker, "send", note)
    bench.loop.worker_connected(bench.worker)
    bench.submit(0)
    bench.run_until(lambda: len(bench.finished()) == 1)
    assert max(in_flight) == most


def test_a_submission_of_many_samples_counts_as_many(bench, monkeypatch):
    send = bench.worker.send
    monkeypatch.setattr(bench.worker, "send", lambda plan: (send(plan), bench.worker.answer()))
    bench.loop.worker_connected(bench.worker)
    for index in range(20):
        bench.submit(index * 100, n=100)
    bench.run_until(lambda: len(bench.told(Accepted)) == 20)
    assert np.diff(bench.worker.accepted_before, prepend=0).max() == 1


def test_a_cancel_waits_for_what_was_submitted_before_it(bench):
    bench.loop.worker_connected(bench.worker)
    for handle in range(500):
        bench.submit(handle)
    bench.loop.act_on(SINK, [499, 3], Scheduler.cancel)
    bench.loop.heartbeat(SINK, 7)
    bench.run_until(lambda: bench.told(session_pb2.Heartbeat))
    assert bench.finished() == {499: FinishReason.CANCELLED, 3: FinishReason.CANCELLED}
    kinds = Counter(type(item) for item in bench.told(object))
    assert kinds[Accepted] == 500


def test_a_request_is_accepted_before_anything_else_is_said_of_it(bench, monkeypatch):
    send = bench.worker.send
    monkeypatch.setattr(bench.worker, "send", lambda plan: (send(plan), bench.worker.answer()))
    bench.loop.worker_connected(bench.worker)
    for handle in range(1000):
        bench.submit(handle, max_tokens=2)
    bench.run_until(lambda: len(bench.finished()) == 1000)
    accepted: set[int] = set()
    for item in bench.told(object):
        if isinstance(item, Accepted):
            accepted.add(item.request.handle)
        else:
            assert accepted.issuperset(item.handles.tolist())


def test_what_was_posted_before_a_request_is_done_before_it(bench, monkeypatch):
    next_request, order = Inbox.next_request, []

    def posted_at_the_last_moment(inbox):
        bench.loop.post(lambda: order.append("post"))
        return next_request(inbox)

    monkeypatch.setattr(Inbox, "next_request", posted_at_the_last_moment)
    bench.loop.act_on(SINK, [0], lambda *_: order.append("request"))
    bench.loop.heartbeat(SINK, 1)
    bench.run_until(lambda: bench.told(session_pb2.Heartbeat))
    assert order[:2] == ["post", "request"]


def test_what_a_closed_session_still_had_in_line_is_refused(bench):
    bench.loop.worker_connected(bench.worker)
    for handle in range(5):
        bench.submit(handle)
    bench.loop.ask(lambda core: core.close_sink(SINK))
    bench.run_until(lambda: len(bench.told(Rejected)) == 5)
    assert len(bench.core.state.queue.waiting) == bench.core.state.pool.slots.running == 0


def test_requests_are_taken_in_while_there_is_no_worker_and_refused(bench):
    bench.submit(0)
    bench.run_until(lambda: bench.told(Rejected))
    assert bench.loop.backlog == 0


def test_every_answer_and_the_first_plan_in_flight_begin_the_silence_anew(monkeypatch):
    begun: list[float] = []

    class Noting(StepTimeout):
        def restart(self, now: float) -> None:
            begun.append(now)

    monkeypatch.setattr(loop, "StepTimeout", Noting)
    bench = Bench()
    send = bench.worker.send
    monkeypatch.setattr(bench.worker, "send", lambda plan: (send(plan), bench.worker.answer()))
    bench.loop.worker_connected(bench.worker)
    bench.submit(0, max_tokens=30)
    bench.run_until(lambda: bench.finished())
    plans = len(bench.worker.accepted_before)
    assert plans >= 30
    assert plans <= len(begun) <= 2 * plans


def test_a_loop_that_drains_takes_nothing_new_and_goes_on_with_what_it_has(bench):
    bench.loop.worker_connected(bench.worker)
    bench.submit(0, max_tokens=3)
    bench.loop.heartbeat(SINK, 1)
    drained = []

    def after_the_first() -> bool:
        if bench.told(session_pb2.Heartbeat) and not drained:
            drained.append(True)
            bench.loop.drain()
            bench.submit(1)
        return bool(bench.told(Rejected))

    bench.run_until(after_the_first)
    (refused,) = bench.told(Rejected)
    assert (refused.handle, refused.error.reason) == (1, "DRAINING")
    assert bench.loop.not_ready_reason == "draining"
    assert [accepted.request.handle for accepted in bench.told(Accepted)] == [0]


class TestInbox:
    def test_a_request_ends_the_wait_where_it_may(self):
        inbox, calls = Inbox(), []
        inbox.put_request(lambda: calls.append("first"), 3)
        assert inbox.wait(None, for_requests=True) == []
        call, samples = inbox.next_request()
        call()
        assert (calls, samples, inbox.requests) == (["first"], 3, 0)

    def test_a_request_that_comes_during_the_wait_ends_it(self):
        inbox = Inbox()
        late = threading.Timer(0.05, lambda: inbox.put_request(lambda: None))
        late.start()
        inbox.wait(None, for_requests=True)
        assert inbox.requests == 1

    def test_requests_that_can_wait_do_not_end_the_wait(self):
        inbox = Inbox()
        inbox.put_request(lambda: None)
        assert inbox.wait(0.001) == []
        assert inbox.urgent() == []
        assert inbox.requests == 1

    def test_urgent_calls_come_together_and_in_order(self):
        inbox, calls = Inbox(), []
        for number in range(3):
            inbox.put(lambda number=number: calls.append(number))
        for call in inbox.wait(None):
            call()
        assert calls == [0, 1, 2]
