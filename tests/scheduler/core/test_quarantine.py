"""Who a worker dies of is found and ended; who only was there when it died loses nothing."""

import random

import pytest

from services.common.errors import Internal
from services.scheduler.core.life.intake import CANARY_ID
from services.scheduler.core.memory.prefix_tree import PrefixTree
from services.scheduler.core.request import AdmissionMode, FinishReason
from tests.fakes.model import FakeShape
from tests.quick import quick_if
from tests.scheduler.core.driver import SINK, Driver, check

SHAPE = FakeShape(
    vocab_size=62, page_size=4, page_count=4096, max_slots=256, max_tokens_per_step=512, max_context_tokens=256,
    first_token=2,
)  # fmt: skip


class Mortal(Driver):
    """Its worker dies of the plan in which a poisoned sample gets its fatal token."""

    def __init__(self, shape: FakeShape = SHAPE, seed: int = 0, **policy) -> None:
        self.fatal: dict[int, int] = {}  # handle -> which of its tokens
        self.losses = 0
        self.random = random.Random(seed)
        self.most_in_flight_apart = 0
        self._dies_behind: int | None = None  # answers
        super().__init__(shape, **policy)

    def collect(self) -> None:
        """The book-keeping is checked now and then: `test_histories` does it after every move."""
        for _, delta in self.core.take_output():
            self._note(delta)
        if self.random.random() < 0.05:
            check(self.core)

    def plan(self, *, light: bool = False):
        plan = super().plan(light=light)
        if plan is not None and self._dies_behind is None and self._is_fatal(plan):
            self._dies_behind = len(self.in_flight) - 1
        if self.core.state.queue.quarantined is not None:
            self.most_in_flight_apart = max(self.most_in_flight_apart, len(self.in_flight))
        return plan

    def _is_fatal(self, plan) -> bool:
        slots = self.core.state.pool.slots
        for slot in (slot for rows in plan.sampling for slot in rows.tolist()):
            sample = slots.samples[slot]
            fatal = self.fatal.get(sample.handle) if sample.request.sink == SINK else None
            if fatal is not None and slots.scheduled[slot] - slots.prompt[slot] + 1 == fatal:
                return True
        return False

    def step(self) -> None:
        while self.plan():
            pass
        if self._dies_behind is None:
            self.answer()
            return
        for _ in range(self.random.randint(0, self._dies_behind)):  # answers that still got through
            self.answer()
        self.lose_worker()

    def lose_worker(self) -> None:
        self.losses += 1
        self._dies_behind = None
        super().lose_worker()

    def check_answers(self, *poisoned: int) -> None:
        """All but the poisoned gave what they would have given alone."""
        while (plan := self.plan()) is not None:
            assert plan.admitted_ids == [CANARY_ID]
            self.answer()
        for handle, seen in self.seen.items():
            tokens, reason = self.expected(handle)
            if handle in poisoned:
                assert seen.finish.reason is FinishReason.ERROR
                assert seen.finish.error.reason == "QUARANTINED"
                assert seen.tokens == tokens[: self.fatal[handle] - 1]
            else:
                assert (seen.tokens, seen.finish.reason) == (tokens, reason), seen.finish.error
        assert self.core.state.queue.quarantined is None
        assert self.core.state.pool.pages.in_use == 0
        assert not self.core.state.queue.requests

    def submit_innocents(self, count: int, longest: int = 60) -> None:
        for _ in range(count):
            tokens = [self.random.randint(2, 61) for _ in range(self.random.randint(1, 40))]
            self.submit(tokens, max_tokens=self.random.randint(10, longest), n=self.random.choice([1, 1, 1, 3]))


@pytest.mark.parametrize("fatal", [1, 2, 30])
@pytest.mark.parametrize("steps_ahead", [2, 8])
def test_a_single_sequence_that_crashes_workers_ends_after_four_losses(fatal, steps_ahead):
    driver = Mortal(steps_ahead=steps_ahead)
    poison = driver.submit([3, 4, 5, 6, 7], max_tokens=40)
    driver.fatal[poison] = fatal
    driver.run()
    driver.check_answers(poison)
    assert driver.losses == 4
    assert driver.seen[poison].finish.error.message == (
        "the worker was lost 4 times while it computed this request, the last 2 times while it computed nothing else"
    )
    assert isinstance(driver.seen[poison].finish.error, Internal)
    assert driver.core.take_failures() == [(f"r{poison}", driver.seen[poison].finish.error)]
    assert driver.core.quarantine.suspects == 0
    assert driver.most_in_flight_apart == 1


@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_one_poisoned_request_among_two_hundred_is_found_and_no_other_ends(mode):
    driver = Mortal(steps_ahead=4, mode=mode)
    driver.submit_innocents(70)
    poison = driver.submit([9] * 20, max_tokens=50)
    driver.submit_innocents(70)
    driver.fatal[poison] = 25
    driver.run()
    driver.check_answers(poison)
    assert len(driver.seen) > 200
    assert driver.losses <= 2 + 3 + 2  # until it is a suspect; an eighth each time; alone


def test_several_poisoned_requests_are_found_though_workers_also_crash_at_random():
    driver = Mortal(steps_ahead=3, seed=3)
    driver.submit_innocents(40)
    poisoned = [driver.submit([9] * length, max_tokens=50) for length in (3, 21, 22)]
    driver.submit_innocents(40)
    driver.fatal = dict(zip(poisoned, (40, 1, 17), strict=True))
    _run_with_kills(driver, mean_steps=200)
    driver.check_answers(*poisoned)


@pytest.mark.parametrize("slots", [SHAPE.max_slots, 4])
def test_a_suspect_is_cleared_only_when_it_progresses_or_ends(slots):
    """Whichever of the poisoned the worker is lost of, and though not all of a group fit beside each other."""
    driver = Mortal(steps_ahead=2)
    handles = [driver.submit([2 + number % 60, number // 60 + 2], max_tokens=40) for number in range(64)]
    poisoned = [handles[2], handles[3], handles[20], handles[21], handles[63]]
    for _ in range(3):
        driver.step()
    driver.plan()
    driver.lose_worker()
    driver.plan()
    driver.shape = FakeShape(**{**SHAPE.__dict__, "max_slots": slots})
    driver.lose_worker()
    assert driver.core.quarantine.suspects == 64
    reached = {handle: len(driver.seen[handle].tokens) for handle in handles}
    driver.fatal = {handle: reached[handle] + 1 for handle in poisoned}
    while driver.core.quarantine.suspects:
        losses = driver.losses
        driver.step()
        past = sum(len(driver.seen[handle].tokens) > reached[handle] for handle in handles)
        ended = sum(driver.seen[handle].finish is not None for handle in poisoned)
        if driver.losses > losses:
            assert driver.core.quarantine.suspects >= 64 - past - ended
    driver.run()
    driver.check_answers(*poisoned)


def test_all_samples_of_a_poisoned_request_end_with_it():
    driver = Mortal(steps_ahead=2)
    poison = driver.submit([9] * 21, max_tokens=20, n=50)
    driver.fatal = dict.fromkeys(range(poison, poison + 50), 1)
    other = driver.submit([8] * 21, max_tokens=20)
    driver.run()
    driver.check_answers(*range(poison, poison + 50))
    assert len(driver.seen[other].tokens) == 20
    assert driver.losses <= 8


@pytest.mark.parametrize(
    ("streams", "longest"),
    quick_if(lambda streams, longest: streams == 3, [(1, 200), (3, 200), (60, 60)]),
)
def test_losses_at_random_times_never_end_a_request(streams, longest):
    losses = seed = suspected = 0
    while losses < 25 or not suspected:
        seed += 1
        driver = Mortal(steps_ahead=2 + seed % 7, seed=seed)
        driver.submit_innocents(streams, longest)
        _run_with_kills(driver, mean_steps=60)
        driver.check_answers()
        losses += driver.losses
        suspected += driver.most_in_flight_apart


@pytest.mark.parametrize("streams", [1, 70])
def test_a_worker_that_crashes_whatever_it_computes_ends_no_request(streams):
    driver = Mortal(steps_ahead=4)
    driver.submit_innocents(streams)
    for losses in range(1, 61):
        plan = driver.plan()
        assert (plan.admitted_ids == [CANARY_ID]) is (losses > 3)
        reason = f"the worker was lost {losses - 1} times in a row before it answered anything" if losses > 3 else ""
        assert driver.core.quarantine.unreliable_reason == reason
        driver.lose_worker()
    assert not any(seen.finish for seen in driver.seen.values())
    driver.run()
    driver.check_answers()
    assert driver.core.quarantine.unreliable_reason == ""
    assert driver.core.take_failures() == []


def test_a_clients_request_may_be_called_canary():
    driver = Mortal(steps_ahead=1)
    driver.submit([9] * 5, max_tokens=4, request_id="canary")
    for _ in range(4):
        driver.plan()
        driver.lose_worker()
    assert driver.plan().admitted_ids == [CANARY_ID]
    assert driver.answer()
    assert driver.core.quarantine.unreliable_reason == ""
    assert list(driver.core.state.queue.requests) == ["canary"]
    driver.run()
    driver.check_answers()
    assert driver.core.state.queue.counters.sequences_finished == 1


def test_a_canary_is_computed_last_after_all_requests_were_cancelled():
    driver = Mortal(steps_ahead=2)
    first = driver.submit([9] * 5, max_tokens=40)
    for _ in range(3):
        driver.plan()
        driver.lose_worker()
    driver.cancel(first)
    assert not driver.core.state.queue.requests
    assert driver.core.quarantine.suspects == 0
    assert driver.plan().admitted_ids == [CANARY_ID]
    assert driver.answer()
    assert driver.plan() is None
    assert driver.core.state.queue.quarantined is None
    assert driver.core.quarantine.unreliable_reason == ""
    assert driver.core.state.pool.pages.in_use == len(driver.core.state.queue.waiting) == 0


@pytest.mark.parametrize("end", ["broken", "too large"])
def test_other_samples_are_in_the_plan_in_which_the_last_suspect_ends(end, monkeypatch):
    driver = Mortal(steps_ahead=2)
    suspect = driver.submit([9] * 5, max_tokens=40)
    for _ in range(2):
        driver.plan()
        driver.lose_worker()
    other = driver.submit([8] * 5, max_tokens=40)
    if end == "broken":
        original = PrefixTree.match

        def breaking(self, tokens, *how):
            if tokens[0] == 9:  # of the suspect
                raise RuntimeError("injected")
            return original(self, tokens, *how)

        monkeypatch.setattr(PrefixTree, "match", breaking)
    else:
        driver.requests[suspect].limit = 10**6
    assert driver.core.state.queue.quarantined is not None
    assert driver.plan().admitted_ids == [f"r{other}"]
    assert driver.seen[suspect].finish.reason is FinishReason.ERROR


def test_a_suspect_that_is_cancelled_is_forgotten_and_others_go_on():
    driver = Mortal(steps_ahead=2)
    poison = driver.submit([9] * 5, max_tokens=30)
    driver.fatal[poison] = 4
    other = driver.submit([8] * 5, max_tokens=30)
    while driver.core.state.queue.quarantined is None:
        driver.step()
    driver.cancel(poison)
    driver.run()
    assert driver.seen[poison].finish.reason is FinishReason.CANCELLED
    assert driver.seen[other].tokens == driver.expected(other)[0]
    assert driver.core.state.queue.quarantined is None


def test_suspects_run_alone_and_new_requests_wait():
    driver = Mortal(steps_ahead=2)
    first = driver.submit([9] * 5, max_tokens=40)
    second = driver.submit([8] * 5, max_tokens=40)
    for _ in range(2):
        driver.step()
        driver.plan()
        driver.lose_worker()
    late = driver.submit([7] * 5, max_tokens=3)
    ran = []
    while driver.core.state.queue.quarantined is not None:
        driver.step()
        ran.append({sample.handle for sample in driver.core.state.pool.slots.running_samples()})
    assert [{first}, {second}] == [handles for at, handles in enumerate(ran[:-1]) if at == 0 or handles != ran[at - 1]]
    driver.run()
    driver.check_answers()
    assert len(driver.seen[late].tokens) == 3


def test_a_worker_lost_without_plans_in_flight_makes_no_suspects():
    driver = Mortal(steps_ahead=2)
    driver.submit([9] * 5, max_tokens=40)
    for _ in range(10):
        driver.plan()
        while driver.answer():
            pass
        driver.lose_worker()
    assert driver.core.state.queue.quarantined is None
    driver.run()
    driver.check_answers()


def test_suspects_are_cleared_in_a_small_pool():
    shape = FakeShape(vocab_size=62, page_size=4, page_count=16, max_slots=8, max_tokens_per_step=16,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Mortal(shape, steps_ahead=2, mode=AdmissionMode.PREDICTED)
    handles = [driver.submit([9, 8, 7, index + 2] * 5, max_tokens=30) for index in range(12)]
    driver.fatal[handles[5]] = 7
    _run_with_kills(driver, mean_steps=80)
    driver.check_answers(handles[5])


def _run_with_kills(driver: Mortal, mean_steps: int) -> None:
    """Until everything is finished; between the worker's losses are so many steps on average."""
    until_kill = driver.random.expovariate(1 / mean_steps)
    while driver.core.live(1):
        until_kill -= 1
        if until_kill <= 0:
            driver.plan()  # which it owes, on a trial, too
            driver.lose_worker()
            until_kill = driver.random.expovariate(1 / mean_steps)
        driver.step()
