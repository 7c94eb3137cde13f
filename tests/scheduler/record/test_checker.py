"""The checker lets every recorded plan pass, and none with something wrong in it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.record.check import check
from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.hashes import FACTOR, next_hashes, prefix_hashes
from services.scheduler.record.reader import RecordedStep
from services.scheduler.record.recorder import Recorder
from services.scheduler.record.violation import Violation
from tests.properties import examples
from tests.scheduler.record.checking import Mutation, replayed, settings_of
from tests.scheduler.record.loop import SHAPE, open_recordings, record_small_run, rewrite
from tokasaurus.worker.v1 import plan_pb2


def violation(steps: list[RecordedStep], step: int, mutate: Mutation) -> Violation:
    with pytest.raises(Violation) as caught:
        for _ in replayed(steps, step, mutate):
            pass
    return caught.value


def put(field: str, index: int, value: int, part: str = "") -> Mutation:
    """Set one element of an array of the plan, or of its ``part``."""

    def mutate(plan: plan_pb2.StepPlan) -> None:
        getattr(getattr(plan, part) if part else plan, field)[index] = value

    return mutate


def groups(*rows: tuple[int, int, int]) -> Mutation:
    """Other groups: (first row, rows, pages)."""

    def mutate(plan: plan_pb2.StepPlan) -> None:
        starts, counts, pages = zip(*rows, strict=True)
        plan.hydragen.CopyFrom(plan_pb2.HydragenGroups(starts=starts, counts=counts, prefix_pages=pages))

    return mutate


def cut(*rows: int) -> Mutation:
    def mutate(plan: plan_pb2.StepPlan) -> None:
        plan.micro_batch_rows[:] = rows

    return mutate


def more_cached(plan: plan_pb2.StepPlan) -> None:
    """Four tokens more than the pages hold."""
    plan.admissions[0].cached_tokens += 4
    plan.batch.token_counts[list(plan.batch.slots).index(plan.admissions[0].slot)] -= 4


GIVEN_TWICE = "given out to write on, but another sequence holds it"
MUTATIONS = {
    "a page appended to two sequences": (5, put("append_pages", 1, 23), GIVEN_TWICE),
    "a page in two admissions": (1, lambda plan: plan.admissions[1].pages.__setitem__(9, 10), GIVEN_TWICE),
    "a sibling that writes on its leader's page": (
        3,
        lambda plan: plan.admissions[0].pages.__setitem__(3, 10),
        GIVEN_TWICE,
    ),
    "a page reused before its release": (12, lambda plan: plan.release_slots.remove(4), GIVEN_TWICE),
    "a copy of another page": (3, put("copy_source_pages", 0, 9), "it does not hold the token at 12"),
    "a copy left out": (
        3,
        lambda plan: (plan.copy_source_pages.pop(), plan.copy_target_pages.pop()),
        "it does not hold the token at 12",
    ),
    "a copy onto a page in use": (3, put("copy_target_pages", 0, 13), "the target of a copy, but not given out"),
    "a copy of a page that is copied onto": (
        3,
        put("copy_source_pages", 1, 18),
        "page 18 is copied from and onto",
    ),
    "cached pages in another order": (
        12,
        lambda plan: plan.admissions[0].pages.__setitem__(slice(0, 2), [12, 13]),
        "it does not hold the token at 0",
    ),
    "more cached tokens than are computed": (
        12,
        more_cached,
        "it does not hold the token at 12",
    ),
    "a group with a stranger": (
        4,
        groups((0, 3, 3), (3, 3, 3)),
        "the rows of the group at row 3 differ",
    ),
    "a group with too long a prefix": (4, groups((0, 3, 4)), "15 tokens are computed, but its group shares 4 pages"),
    "a group that shares more pages than there are": (
        9,
        groups((0, 3, 9)),
        "its group shares 9 pages",
    ),
    "a group over a boundary": (4, groups((0, 5, 3)), "the group at row 0 goes on behind row 3"),
    "groups that overlap": (4, groups((0, 3, 3), (2, 1, 3)), "two groups overlap"),
    "a group behind the batch": (4, groups((5, 2, 3)), "a group ends at row 7 of a batch of 6 rows"),
    "a group without pages": (4, groups((0, 3, 0)), "counts and prefix_pages must be 1 or more"),
    "a group without rows": (4, groups((0, 0, 3)), "counts and prefix_pages must be 1 or more"),
    "groups of an earlier batch": (
        10,
        lambda plan: plan.ClearField("hydragen"),
        "ends at row 5 of a batch of 4 rows",
    ),
    "a boundary that moves into a group": (9, cut(2, 3), "the group at row 0 goes on behind row 2"),
    "micro-batches that miss a row": (4, cut(3, 2), "micro_batch_rows of 5 rows beside a batch of 6 rows"),
    "micro-batches without a batch": (5, cut(3, 3), "micro_batch_rows of 6 rows beside no batch"),
    "too many micro-batches": (4, cut(3, 3, *[0] * 7), "max_micro_batches is 8: give at most 8"),
    "a step left out": (5, lambda plan: setattr(plan, "step", 6), "step 6 follows step 4: expected 5"),
    "a batch with a released slot": (
        11,
        lambda plan: plan.release_slots.append(4),
        "slot 4 is not in use",
    ),
    "a slot twice in the batch": (4, put("slots", 0, 2, "batch"), "batch.slots names a slot twice"),
    "more tokens than a step may have": (
        2,
        put("token_counts", 0, 24, "batch"),
        "a batch of 25 tokens: at most",
    ),
    "more tokens than are known": (
        13,
        lambda plan: plan.batch.token_counts.append(2),
        "2 tokens to compute, but only 1",
    ),
    "a release of a free slot": (11, put("release_slots", 0, 7), "release_slots: slot 7 is not in use"),
    "an admission into a taken slot": (
        12,
        lambda plan: plan.release_slots.remove(5),
        "slot 5 is in use",
    ),
    "a page left out": (
        5,
        lambda plan: (plan.append_slots.pop(), plan.append_pages.pop()),
        "is too short for 17 tokens",
    ),
    "a page outside the pool": (5, put("append_pages", 0, 64), "page 64 is out of range, page_count=64"),
    "a token outside the vocabulary": (
        12,
        lambda plan: plan.admissions[0].token_ids.__setitem__(16, 64),
        "token 64 is out of range, vocab_size=64",
    ),
    "an endless temperature": (1, settings_of(temperature=math.inf), "temperature is inf"),
    "a temperature that is not a number": (1, settings_of(temperature=math.nan), "temperature is nan"),
    "a negative temperature": (1, settings_of(temperature=-1), "temperature is -1:"),
    "a top_p that is not a number": (1, settings_of(top_p=math.nan), "top_p is nan"),
    "a bias that is not a number": (
        1,
        settings_of(logit_bias_token_ids=[1], logit_bias_values=[math.nan]),
        "logit_bias_values holds a value that is not finite",
    ),
    "an endless bias": (
        1,
        settings_of(logit_bias_token_ids=[1], logit_bias_values=[-math.inf]),
        "logit_bias_values holds a value that is not finite",
    ),
    "a bias outside the vocabulary": (
        1,
        settings_of(logit_bias_token_ids=[64], logit_bias_values=[1]),
        "logit_bias_token_ids: token 64 is out of range",
    ),
    "more top logprobs than there are": (1, settings_of(top_logprobs=21), "top_logprobs=21"),
    "no sampling settings": (
        12,
        lambda plan: plan.admissions[0].ClearField("sampling"),
        "sampling.parameters is not set",
    ),
}


def test_the_recorded_run_is_what_the_mutations_think_it_is(steps):
    plans = {step.plan.plan.step: step.plan.plan for step in steps}
    assert list(plans[3].copy_source_pages) == [10] * 4
    assert list(plans[4].micro_batch_rows) == [3, 3]
    assert list(plans[4].hydragen.counts) == [3, 2]
    assert list(plans[12].release_slots) == [1, 2, 3, 4, 5]
    assert plans[12].admissions[0].cached_tokens == 12
    for checker in replayed(steps):
        assert checker.pages_in_use == np.count_nonzero(checker.holders)
    assert checker.last.step == len(plans)


@pytest.mark.parametrize(("step", "mutate", "message"), MUTATIONS.values(), ids=list(MUTATIONS))
def test_a_plan_with_something_wrong_in_it_is_refused(step, mutate, message, steps):
    found = violation(steps, step, mutate)
    assert message in found.message
    assert found.step == step or "follows step" in message


def test_a_violation_names_step_slot_and_page(steps):
    found = violation(steps, 5, put("append_pages", 1, 23))
    assert (found.step, found.slot, found.page) == (5, 2, 23)
    assert str(found) == f"step 5, slot 2, page 23: {GIVEN_TWICE}"
    found = violation(steps, 3, put("copy_source_pages", 0, 9))
    assert (found.step, found.slot, found.page) == (3, 5, 18)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_page_that_somebody_holds_is_never_given_away(steps, data):
    numbered = {recorded.plan.plan.step: recorded.plan.plan for recorded in steps}
    step = data.draw(st.sampled_from([number for number, plan in numbered.items() if plan.append_pages]))
    *_, before = replayed(steps[: step - 1])
    released = {int(page) for slot in numbered[step].release_slots for page in before.slots.page_table[slot]}
    held = sorted(set(np.flatnonzero(before.holders).tolist()) - released)
    index = data.draw(st.integers(0, len(numbered[step].append_pages) - 1))
    page = data.draw(st.sampled_from(held))
    found = violation(steps, step, put("append_pages", index, page))
    assert (found.step, found.page) == (step, page)


def test_a_stale_page_is_caught_when_its_owner_writes():
    """Page 1 still holds what slot 1 says is cached, but slot 0 got it and goes on to write there."""
    checker = PlanChecker(SHAPE.limits)
    sampling = plan_pb2.SamplingSettings(parameters={})

    def run(**parts) -> None:
        checker.apply(plan_pb2.StepPlan(step=checker.last.step + 1, **parts))
        checker.result_received(None)

    first = plan_pb2.Admission(slot=0, token_ids=range(8), pages=[0, 1], sampling=sampling)
    run(admissions=[first], batch=plan_pb2.Batch(slots=[0], token_counts=[8]))
    owner = plan_pb2.Admission(slot=0, token_ids=range(20, 28), pages=[2, 1], sampling=sampling)
    run(release_slots=[0], admissions=[owner], batch=plan_pb2.Batch(slots=[0], token_counts=[4]))
    reader = plan_pb2.Admission(slot=1, token_ids=range(9), cached_tokens=8, pages=[0, 1, 3], sampling=sampling)
    run(admissions=[reader], batch=plan_pb2.Batch(slots=[1]))
    with pytest.raises(Violation, match="step 4, slot 0, page 1: written to, but other sequences hold it"):
        run(batch=plan_pb2.Batch(slots=[0], token_counts=[4]))


def test_a_worker_without_the_capability_gets_no_groups_and_no_micro_batches(steps):
    for missing, message in (
        ({"hydragen": False}, "hydragen is false"),
        ({"max_micro_batches": 0}, "micro_batches is 1"),
    ):
        with pytest.raises(Violation, match=message):
            list(replayed(steps, shape=replace(SHAPE, **missing)))


def test_no_more_top_logprobs_than_the_vocabulary_has_tokens(steps):
    with pytest.raises(Violation, match="top_logprobs=65"):
        list(replayed(steps, 1, settings_of(top_logprobs=65), replace(SHAPE, max_top_logprobs=100)))


def test_more_plans_without_an_answer_than_agreed_are_refused(tmp_path):
    recording = record_small_run(tmp_path / "run")  # agreed: three
    steps = list(recording.steps())
    for count, expected in ((3, ""), (4, "step 4: 4 plans in flight, and plans_in_flight=3 was agreed")):
        for answered in (True, False):
            recorder = Recorder(str(tmp_path / f"{count}-{answered}"))
            recorder.connected(recording.info, 3)
            for step in steps[:count]:
                recorder.plan(step.plan.plan, step.plan.admitted_ids, step.plan.released_ids)
            for step in steps[:count] if answered else ():
                recorder.result(step.result.result)
            recorder.close()
            (made,) = open_recordings(str(tmp_path / f"{count}-{answered}"))
            assert check(made).violation == expected


def test_a_release_under_the_name_of_another_request_is_refused(tmp_path):
    def mutate(step: RecordedStep) -> None:
        if step.plan.plan.step == 12:
            step.plan.released_ids[1] = "long"

    recording = rewrite(record_small_run(tmp_path / "run"), tmp_path / "other", mutate)
    expected = "step 12, slot 2: released for the request 'long', but it is of another request (many:4)"
    assert check(recording).violation == expected


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_prefix_hashes_are_those_of_one_token_after_another(tokens):
    value, expected = 0, []
    for token in tokens:
        value = (value * FACTOR + token + 1) % 2**64
        expected.append(value)
    found = prefix_hashes(np.array(tokens, np.uint32))
    assert found.tolist() == expected
    assert next_hashes(found[:-1], np.array(tokens[1:], np.uint32)).tolist() == expected[1:]
