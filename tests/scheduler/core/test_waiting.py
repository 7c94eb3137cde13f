"""The waiting queue: nothing is lost or doubled, classes are kept, keys get like shares, and age reaches everybody."""

import gc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.plan.types import SamplingSettings
from services.scheduler.core.queue.waiting import WaitingQueue
from services.scheduler.core.request import Priority, Request, Sample
from tests.properties import examples
from tests.scheduler.core.naive_queue import Naive

HIGH, NORMAL, LOW = Priority
EVERYTHING = 1_000_000
LARGE = 4096
SETTINGS, TOKENS = SamplingSettings(), np.zeros(1, np.uint32)


class Arrivals:
    """Makes samples as the core does: numbered in the order of arrival."""

    def __init__(self):
        self.made = []

    def request(self, *, key="", priority=NORMAL, cost=100, n=1, now_ns=0):
        request = Request(f"r{len(self.made)}", TOKENS, SETTINGS, n=n, priority=priority, fairness_key=key)
        request.cost, request.limit = cost, cost + 1
        samples = [Sample(request, offset, len(self.made) + offset, now_ns) for offset in range(n)]
        self.made += samples
        return samples

    def sample(self, **fields):
        return self.request(**fields)[0]


@pytest.fixture
def arrivals():
    return Arrivals()


def filled(samples, ageing_ns=0):
    queue = WaitingQueue(ageing_ns)
    for sample in samples:
        queue.push(sample)
    return queue


def take(queue, most):
    """The next ``most`` samples leave the queue."""
    taken = queue.candidates(most)
    for sample in taken:
        queue.remove(sample)
    return taken


def serve(queue, most=1):
    """The next ``most`` samples leave the queue, and are computed."""
    served = take(queue, most)
    for sample in served:
        queue.charge(sample.request.priority, sample.request.fairness_key, sample.request.cost)
    return served


def drain(queue, most=1):
    """The whole order of service, ``most`` samples at a time."""
    order = []
    while queue:
        order += serve(queue, most)
    return order


moves = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "priority": st.sampled_from(list(Priority)),
                "key": st.sampled_from(["", "a", "b", "c"]),
                "cost": st.sampled_from([1, 700, 2000, LARGE, 5000, 30_000]),
                "n": st.sampled_from([1, 1, 1, 2, 5]),
            }
        ),
        st.tuples(st.sampled_from(["serve", "interrupt", "wait"]), st.integers(1, 8)),
        st.tuples(st.just("skip"), st.sets(st.integers(0, 9), min_size=1)),
        st.tuples(st.just("remove"), st.integers(0, 40)),
        st.tuples(
            st.just("charge"), st.tuples(st.sampled_from(list(Priority)), st.sampled_from("abc"), st.integers(1, 9999))
        ),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from([0, 1, 3]), moves, st.integers(1, 20), st.integers(0, 3))
def test_every_history_is_served_by_the_rules_and_nothing_is_lost_or_doubled(ageing_ns, moves, most, most_low):
    arrivals, queue, naive = Arrivals(), WaitingQueue(ageing_ns), Naive(ageing_ns)
    now_ns, running = 0, []
    for move in moves:
        match move:
            case dict():
                for sample in arrivals.request(**move, now_ns=now_ns):
                    queue.push(sample)
                    naive.push(sample)
            case ("serve", many):
                served = take(queue, many)
                for sample in served:
                    naive.leave(sample)
                running += served
            case ("skip", places):
                for place, sample in enumerate(queue.candidates(10)):
                    if place in places:
                        queue.remove(sample)
                        naive.leave(sample)
                        running.append(sample)
            case ("remove", place) if queue:
                sample = list(queue)[place % len(queue)]
                queue.remove(sample)
                naive.leave(sample)
            case ("interrupt", many):
                for sample in running[:many]:
                    queue.push_front(sample)
                    naive.push(sample, front=True)
                del running[:many]
            case ("charge", computed):
                queue.charge(*computed)
                naive.charge(*computed)
            case ("wait", time):
                now_ns += time
        order = queue.candidates(EVERYTHING)
        assert order == naive.order()
        assert queue.candidates(most) == order[:most]
        assert queue.candidates(EVERYTHING) == order
        assert queue.candidates(EVERYTHING, most_low) == naive.order(most_low)
        waiting = naive.samples()
        assert sorted(map(id, queue)) == sorted(map(id, waiting))
        assert len(queue) == len(waiting) == len(order)
        assert queue.tokens == sum(sample.request.limit for sample in waiting)
        for sample in arrivals.made:
            assert sample.request.waiting == sum(each.request is sample.request for each in waiting)
    assert sorted(map(id, drain(queue, most))) == sorted(map(id, order))
    assert len(queue) == queue.tokens == 0


costs = st.lists(st.integers(1, 3 * LARGE), min_size=1, max_size=30)


def most_apart(queue, most):
    """How far apart, in tokens, the service of two keys comes while both have work left."""
    left = {key: sum(sample.request.fairness_key == key for sample in queue) for key in ("first", "second")}
    got, apart = dict.fromkeys(left, 0), 0
    for sample in drain(queue, most):
        key = sample.request.fairness_key
        got[key] += sample.request.cost
        left[key] -= 1
        if not all(left.values()):
            break
        apart = max(apart, abs(got["first"] - got["second"]))
    return apart


@given(costs, costs, st.integers(1, 7))
def test_keys_with_work_left_get_equal_service_up_to_a_plan_and_a_sample(first, second, most):
    arrivals = Arrivals()
    queue = filled([arrivals.sample(key="first", cost=c) for c in first])
    for cost in second:
        queue.push(arrivals.sample(key="second", cost=cost))
    assert most_apart(queue, most) <= 2 * max(first + second) + 1


@given(costs, costs, st.integers(1, 29), st.integers(1, 7))
def test_a_key_that_joins_late_gets_the_same_from_then_on(first, second, before, most):
    arrivals = Arrivals()
    queue = filled([arrivals.sample(key="first", cost=c) for c in first])
    serve(queue, before)
    for cost in second:
        queue.push(arrivals.sample(key="second", cost=cost))
    assert most_apart(queue, most) <= 2 * max(first + second) + 1


def test_one_key_is_first_come_first_served(arrivals):
    samples = [arrivals.sample(cost=cost) for cost in (50_000, 1, 300, 9000, 2)] + arrivals.request(n=100)
    queue = filled(samples)
    assert queue.candidates(3) == samples[:3]
    assert drain(queue, most=7) == samples


def test_without_ageing_a_class_waits_for_all_higher_ones(arrivals):
    samples = [arrivals.sample(priority=priority, key=key) for key in "ab" for priority in (LOW, HIGH, NORMAL)]
    order = filled(samples).candidates(EVERYTHING)
    assert [sample.request.priority for sample in order] == [HIGH, HIGH, NORMAL, NORMAL, LOW, LOW]


def test_one_request_of_thousands_does_not_hold_up_another_key(arrivals):
    batch = arrivals.request(key="batch", n=16_384)
    queue = filled(batch)
    serve(queue, 100)
    single = arrivals.sample(key="single")
    queue.push(single)
    assert queue.candidates(3) == [single, *batch[100:102]]


def test_a_huge_sample_takes_no_rounds_of_work(arrivals):
    huge = [arrivals.sample(key=key, cost=10**15) for key in "ab"]
    assert drain(filled(huge)) == huge


def test_a_key_gets_no_credit_for_the_time_that_it_was_idle(arrivals):
    queue = filled([arrivals.sample(key="busy") for _ in range(300)] + [arrivals.sample(key="idle")])
    serve(queue, 200)
    for _ in range(100):
        queue.push(arrivals.sample(key="idle"))
    keys = [sample.request.fairness_key for sample in queue.candidates(100)]
    assert keys.count("idle") in (50, 51)


def test_a_key_that_took_more_than_its_share_waits_for_the_others(arrivals):
    queue = filled([arrivals.sample(key=key) for key in "ab" * 20])
    serve(queue, 2)
    queue.charge(NORMAL, "a", 400)
    keys = [sample.request.fairness_key for sample in queue.candidates(6)]
    assert keys[:4] == ["b"] * 4


def test_what_is_computed_for_a_key_that_does_not_wait_counts_while_others_wait(arrivals):
    queue = filled([arrivals.sample(key="a"), *(arrivals.sample(key="b") for _ in range(9))])
    serve(queue, 2)
    queue.charge(NORMAL, "a", 250)
    queue.push(arrivals.sample(key="a"))
    assert [sample.request.fairness_key for sample in queue.candidates(4)] == ["b", "b", "b", "a"]


def test_new_keys_without_end_do_not_starve_one_that_stays(arrivals):
    queue = filled([arrivals.sample(key="stays", cost=100) for _ in range(3)])
    served = []
    for number in range(400):
        queue.push(arrivals.sample(key=f"new {number}", cost=100))
        served += serve(queue)
    assert [sample.request.fairness_key for sample in served].count("stays") >= 2


def test_a_key_that_never_waits_is_forgotten_when_no_key_waits(arrivals):
    queue = filled([arrivals.sample(key="a"), arrivals.sample(key="b")])
    queue.charge(NORMAL, "a", 10**6)
    drain(queue)
    for key in "aabb":
        queue.push(arrivals.sample(key=key))
    assert [sample.request.fairness_key for sample in queue.candidates(4)] == ["a", "b", "a", "b"]


def test_keys_that_come_and_go_do_not_starve_one_that_stays(arrivals):
    queue = filled([arrivals.sample(key="stays", cost=LARGE) for _ in range(100)])
    for key in ("x", "y"):
        queue.push(arrivals.sample(key=key, cost=LARGE))
    served = []
    for _ in range(90):
        (sample,) = serve(queue)
        served.append(sample.request.fairness_key)
        if served[-1] != "stays":
            queue.push(arrivals.sample(key=served[-1], cost=LARGE))
    assert [served.count(key) for key in ("stays", "x", "y")] == [30, 30, 30]


def test_preempted_samples_are_first_of_their_key_and_the_last_one_leads(arrivals):
    first, second, third, other = [arrivals.sample(key=key) for key in ("a", "a", "a", "b")]
    queue = filled([first, second, third, other])
    queue.remove(first)
    queue.remove(second)
    queue.push_front(second)
    queue.push_front(first)
    order = queue.candidates(EVERYTHING)
    assert [sample for sample in order if sample is not other] == [first, second, third]


def test_a_cancelled_sample_costs_its_key_nothing(arrivals):
    cancelled, kept = [arrivals.sample(key="a", cost=LARGE) for _ in range(2)]
    other = arrivals.sample(key="b", cost=LARGE)
    queue = filled([cancelled, kept, other])
    queue.remove(cancelled)
    assert queue.candidates(EVERYTHING) == [kept, other]
    assert (cancelled.request.waiting, kept.request.waiting, queue.tokens) == (0, 1, 2 * (LARGE + 1))


def test_serving_past_a_sample_leaves_its_turn(arrivals):
    held_up = [arrivals.sample(key="a", cost=LARGE) for _ in range(3)]
    others = [arrivals.sample(key="b", cost=LARGE) for _ in range(3)]
    queue = filled([*held_up, *others])
    queue.remove(others[0])
    queue.remove(others[1])
    queue.charge(NORMAL, "b", 2 * LARGE)
    assert queue.candidates(EVERYTHING) == [*held_up, others[2]]


def test_a_sample_that_is_not_here_cannot_leave(arrivals):
    here, gone = arrivals.sample(), arrivals.sample()
    queue = filled([here])
    with pytest.raises(KeyError):
        queue.remove(gone)


@given(st.integers(1, 30), st.integers(0, 30), st.sampled_from([NORMAL, LOW]), st.integers(1, 3))
def test_with_ageing_a_low_sample_is_served_in_bounded_time_while_high_ones_keep_arriving(
    ageing_ns, backlog, priority, keys
):
    arrivals, now_ns = Arrivals(), 0
    low = arrivals.sample(priority=priority)
    queue = filled([low, *(arrivals.sample(priority=HIGH) for _ in range(backlog))], ageing_ns)
    while True:
        queue.push(arrivals.sample(priority=HIGH, key=str(now_ns % keys), now_ns=now_ns))
        served = take(queue, 1)
        if served == [low]:
            break
        now_ns += 1
        assert now_ns <= (keys + 1) * backlog + (priority + 1) * ageing_ns + keys


def test_a_class_that_goes_ahead_by_age_serves_its_oldest_of_whatever_key_and_counts_it(arrivals):
    old = [arrivals.sample(priority=LOW, key=key, now_ns=t, cost=LARGE) for t, key in enumerate("aab")]
    young = [arrivals.sample(priority=LOW, key=key, now_ns=100, cost=LARGE) for key in "ab"]
    high = [arrivals.sample(priority=HIGH, now_ns=100) for _ in range(2)]
    queue = filled([*old, *young, *high], ageing_ns=30)
    # "a" took two turns by age and "b" one, so "b" is next when the high ones are gone.
    assert queue.candidates(EVERYTHING) == [*old, *high, young[1], young[0]]


def test_service_by_age_does_not_make_new_keys_wait_for_it(arrivals):
    old = [arrivals.sample(priority=LOW, key="old", cost=LARGE) for _ in range(5)]
    young = [arrivals.sample(priority=LOW, key="young", now_ns=100, cost=LARGE) for _ in range(5)]
    queue = filled([*old, *young, arrivals.sample(priority=HIGH, now_ns=100)], ageing_ns=30)
    take(queue, 4)
    new = arrivals.sample(priority=LOW, key="new", now_ns=100, cost=LARGE)
    queue.push(new)
    assert queue.candidates(4)[2:] == [young[0], new]


@pytest.mark.parametrize(("accepted_ns", "low_first"), [(19, False), (20, False), (21, True)])
def test_a_class_competes_as_if_accepted_later_and_at_equal_times_the_higher_goes_first(
    arrivals, accepted_ns, low_first
):
    low, high = arrivals.sample(priority=LOW), arrivals.sample(priority=HIGH, now_ns=accepted_ns)
    assert filled([low, high], ageing_ns=10).candidates(2) == ([low, high] if low_first else [high, low])


def test_classes_alike_in_age_keep_their_order(arrivals):
    samples = [arrivals.sample(priority=priority) for priority in (LOW, NORMAL, HIGH)]
    order = filled(samples, ageing_ns=10).candidates(EVERYTHING)
    assert [sample.request.priority for sample in order] == [HIGH, NORMAL, LOW]


@pytest.mark.parametrize("ageing_ns", [0, 10])
def test_samples_that_left_are_not_kept(ageing_ns):
    queue = filled([Arrivals().sample(key="stays", cost=10**9)], ageing_ns)
    for batch in pairwise(range(0, 5001, 100)):
        samples = [Sample(Arrivals().sample(key=str(i % 7)).request, 0, i + 1, i) for i in range(*batch)]
        for sample in samples:
            queue.push(sample)
        for sample in samples:
            queue.remove(sample)
    del samples, sample
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is Sample and each.request.fairness_key in set("0123456")]
    assert len(held) <= 100
