"""The checker lets every recorded plan pass, and none with something wrong in it."""

import math
from collections.abc import Callable, Iterator
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
from services.scheduler.record.violation import PlanViolation, ResultViolation
from tests.fakes.model import FakeModel, FakeShape
from tests.scheduler.record.loop import SHAPE, open_recordings, record_small_run, rewrite
from tokasaurus.worker.v1 import plan_pb2

Mutation = Callable[[plan_pb2.StepPlan], None]


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[RecordedStep]:
    """Slot 0 prefills 40 tokens over three steps; slots 1 to 5 share a prompt of 15 tokens, in pages of 4, and its last
    page is copied in step 3. Step 4 has the first groups, step 12 releases all and admits another.
    """
    return list(record_small_run(tmp_path_factory.mktemp("recording")).steps())


def replayed(
    steps: list[RecordedStep], step: int = 0, mutate: Mutation | None = None, shape: FakeShape = SHAPE
) -> Iterator[PlanChecker]:
    """The checker behind each step; the plan of ``step`` is changed first."""
    checker = PlanChecker(shape)
    for recorded in steps:
        plan = plan_pb2.StepPlan.FromString(recorded.plan.plan.SerializeToString())
        if plan.step == step:
            mutate(plan)
        checker.apply(plan)
        checker.answered(recorded.result.result)
        yield checker


def violation(steps: list[RecordedStep], step: int, mutate: Mutation) -> PlanViolation:
    with pytest.raises(PlanViolation) as caught:
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


def settings_of(**values) -> Mutation:
    """Other sampling settings in the first admission."""
    return lambda plan: plan.admissions[0].sampling.MergeFrom(plan_pb2.SamplingSettings(**values))


GIVEN_TWICE = "given to be written on, and another sequence holds it"
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
    "a copy onto a page in use": (3, put("copy_target_pages", 0, 13), "copied onto, and this plan gives it to nobody"),
    "a copy of a page that is copied onto": (3, put("copy_source_pages", 1, 18), "both copied and copied onto"),
    "cached pages in another order": (
        12,
        lambda plan: plan.admissions[0].pages.__setitem__(slice(0, 2), [12, 13]),
        "it does not hold the token at 0",
    ),
    "more cached tokens than are computed": (
        12,
        lambda plan: setattr(plan.admissions[0], "cached_tokens", 16),
        "it does not hold the token at 12",
    ),
    "a group with a stranger": (4, groups((0, 3, 3), (3, 3, 3)), "its group shares 3 pages, and page 13 is in"),
    "a group with too long a prefix": (4, groups((0, 3, 4)), "its group shares 16 tokens, and 15 of its own"),
    "a group that shares more pages than there are": (9, groups((0, 3, 9)), "its group shares 9 pages, and it has"),
    "a group over a boundary": (4, groups((0, 5, 3)), "5 rows from row 0 on: it crosses the boundary"),
    "groups that overlap": (4, groups((0, 3, 3), (2, 1, 3)), "1 rows from row 2 on: it overlaps another group"),
    "a group behind the batch": (4, groups((5, 2, 3)), "2 rows from row 5 on: the batch has 6 rows"),
    "a group without pages": (4, groups((0, 3, 0)), "it shares no pages"),
    "a group without rows": (4, groups((0, 0, 3)), "it has no rows"),
    "groups of an earlier batch": (10, lambda plan: plan.ClearField("hydragen"), "the batch has 4 rows"),
    "a boundary that moves into a group": (9, cut(2, 3), "it crosses the boundary of a micro-batch"),
    "micro-batches that miss a row": (4, cut(3, 2), "micro_batch_rows add up to 5, and the batch has 6 rows"),
    "micro-batches without a batch": (5, cut(3, 3), "micro_batch_rows without a batch"),
    "too many micro-batches": (4, cut(3, 3, *[0] * 7), "9 micro-batches, and the worker takes 8 at most"),
    "a step left out": (5, lambda plan: setattr(plan, "step", 6), "it follows step 4: expected was 5"),
    "a batch with a released slot": (11, lambda plan: plan.release_slots.append(4), "in the batch, and it is free"),
    "a slot twice in the batch": (4, put("slots", 0, 2, "batch"), "twice in the batch"),
    "more tokens than a step may have": (2, put("token_counts", 0, 24, "batch"), "25 tokens, at most 24"),
    "more tokens than are known": (13, lambda plan: plan.batch.token_counts.append(2), "computes more tokens than"),
    "a release of a free slot": (11, put("release_slots", 0, 7), "released, and it is free"),
    "an admission into a taken slot": (12, lambda plan: plan.release_slots.remove(5), "admission, and it is taken"),
    "a page left out": (5, lambda plan: (plan.append_slots.pop(), plan.append_pages.pop()), "computes past its pages"),
    "a page outside the pool": (5, put("append_pages", 0, 64), "a page outside the pool"),
    "a token outside the vocabulary": (
        12,
        lambda plan: plan.admissions[0].token_ids.__setitem__(16, 64),
        "outside the vocabulary",
    ),
    "an endless temperature": (1, settings_of(temperature=math.inf), "temperature=inf"),
    "a temperature that is not a number": (1, settings_of(temperature=math.nan), "temperature=nan"),
    "a negative temperature": (1, settings_of(temperature=-1), "temperature=-1.0"),
    "a top_p that is not a number": (1, settings_of(top_p=math.nan), "top_p=nan"),
    "a bias that is not a number": (
        1,
        settings_of(logit_bias_token_ids=[1], logit_bias_values=[math.nan]),
        "logit_bias_values that are not finite",
    ),
    "an endless bias": (
        1,
        settings_of(logit_bias_token_ids=[1], logit_bias_values=[-math.inf]),
        "logit_bias_values that are not finite",
    ),
    "a bias outside the vocabulary": (
        1,
        settings_of(logit_bias_token_ids=[64], logit_bias_values=[1]),
        "a bias outside the vocabulary",
    ),
    "more top logprobs than there are": (1, settings_of(top_logprobs=21), "top_logprobs=21"),
    "no sampling settings": (12, lambda plan: plan.admissions[0].ClearField("sampling"), "without sampling settings"),
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
    assert checker.step == len(plans)


@pytest.mark.parametrize(("step", "mutate", "message"), MUTATIONS.values(), ids=list(MUTATIONS))
def test_a_plan_with_something_wrong_in_it_is_refused(step, mutate, message, steps):
    found = violation(steps, step, mutate)
    assert message in found.message
    assert found.step == step or "it follows" in message


def test_a_violation_names_step_slot_and_page(steps):
    found = violation(steps, 5, put("append_pages", 1, 23))
    assert (found.step, found.slot, found.page) == (5, 2, 23)
    assert str(found) == f"step 5, slot 2, page 23: {GIVEN_TWICE}"
    found = violation(steps, 3, put("copy_source_pages", 0, 9))
    assert (found.step, found.slot, found.page) == (3, 5, 18)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_page_that_somebody_holds_is_never_given_away(steps, data):
    numbered = {recorded.plan.plan.step: recorded.plan.plan for recorded in steps}
    step = data.draw(st.sampled_from([number for number, plan in numbered.items() if plan.append_pages]))
    *_, before = replayed(steps[: step - 1])
    released = {int(page) for slot in numbered[step].release_slots for page in before.tables[slot]}
    held = sorted(set(np.flatnonzero(before.holders).tolist()) - released)
    index = data.draw(st.integers(0, len(numbered[step].append_pages) - 1))
    page = data.draw(st.sampled_from(held))
    found = violation(steps, step, put("append_pages", index, page))
    assert (found.step, found.page) == (step, page)


def test_a_stale_page_is_caught_when_its_owner_writes():
    """Page 1 still holds what slot 1 says is cached, but slot 0 got it and goes on to write there."""
    checker = PlanChecker(SHAPE)
    sampling = plan_pb2.SamplingSettings(top_p=1)

    def run(**parts) -> None:
        checker.apply(plan_pb2.StepPlan(step=checker.step + 1, **parts))
        checker.answered(None)

    first = plan_pb2.Admission(slot=0, token_ids=range(8), pages=[0, 1], sampling=sampling)
    run(admissions=[first], batch=plan_pb2.Batch(slots=[0], token_counts=[8]))
    owner = plan_pb2.Admission(slot=0, token_ids=range(20, 28), pages=[2, 1], sampling=sampling)
    run(release_slots=[0], admissions=[owner], batch=plan_pb2.Batch(slots=[0], token_counts=[4]))
    reader = plan_pb2.Admission(slot=1, token_ids=range(9), cached_tokens=8, pages=[0, 1, 3], sampling=sampling)
    run(admissions=[reader], batch=plan_pb2.Batch(slots=[1]))
    with pytest.raises(PlanViolation, match="step 4, slot 0, page 1: written to, and others hold it too"):
        run(batch=plan_pb2.Batch(slots=[0], token_counts=[4]))


def test_a_worker_without_the_capability_gets_no_groups_and_no_micro_batches(steps):
    for missing, message in (({"hydragen": False}, "the worker takes none"), ({"max_micro_batches": 0}, "takes 1 at")):
        with pytest.raises(PlanViolation, match=message):
            list(replayed(steps, shape=replace(SHAPE, **missing)))


def test_no_more_top_logprobs_than_the_vocabulary_has_tokens(steps):
    with pytest.raises(PlanViolation, match="top_logprobs=65"):
        list(replayed(steps, 1, settings_of(top_logprobs=65), replace(SHAPE, max_top_logprobs=100)))


WRONG_ANSWERS = {
    "a row without a token": lambda result: (result.slots.pop(), result.token_ids.pop()),
    "a token too many": lambda result: (result.slots.append(7), result.token_ids.append(2)),
    "another order": lambda result: result.slots.__setitem__(slice(0, 2), result.slots[1::-1]),
    "arrays of unequal length": lambda result: result.token_ids.pop(),
    "a failure and a token": lambda result: result.failures.add(slot=7, message="no"),
    "a token outside the vocabulary": lambda result: result.token_ids.__setitem__(0, 64),
    "another step": lambda result: setattr(result, "step", 5),
}


@pytest.mark.parametrize("mutate", WRONG_ANSWERS.values(), ids=list(WRONG_ANSWERS))
def test_an_answer_that_does_not_fit_its_plan_is_refused(mutate, steps):
    *_, checker = replayed(steps[:3])
    checker.apply(steps[3].plan.plan)
    answer = plan_pb2.StepResult.FromString(steps[3].result.result.SerializeToString())
    mutate(answer)
    with pytest.raises(ResultViolation, match="step 4"):
        checker.answered(answer)


def logprobs_model(*, failing: bool = False) -> tuple[PlanChecker, plan_pb2.StepResult]:
    """A checker whose plan is applied, and the right answer to it: slot 0 asks for nothing, slot 1 for its logprob,
    slot 2 for its own and two others; slot 3, if ``failing``, asks for three and fails.
    """
    wanted = [(False, 0), (True, 0), (True, 2), (True, 3)][: 3 + failing]
    admissions = [
        plan_pb2.Admission(
            slot=slot, token_ids=[slot + 5], pages=[slot],
            sampling=plan_pb2.SamplingSettings(top_p=1, logprobs=own, top_logprobs=top),
        )
        for slot, (own, top) in enumerate(wanted)
    ]  # fmt: skip
    batch = plan_pb2.Batch(slots=range(len(wanted)))
    plan = plan_pb2.StepPlan(step=1, admissions=admissions, batch=batch)
    model, checker = FakeModel(SHAPE), PlanChecker(SHAPE)
    model.fail_tokens[8] = "no"
    checker.apply(plan)
    return checker, model.apply(plan)


WRONG_LOGPROBS = {
    "none at all": (lambda result: result.ClearField("logprobs"), "0 logprobs for 3 slots"),
    "one too many": (lambda result: result.logprobs.append(-1), "4 logprobs for 3 slots"),
    "none for a row that asked": (
        lambda result: result.logprobs.__setitem__(1, math.nan),
        "slot 1: no logprob, and its row asked",
    ),
    "one for a row that did not ask": (
        lambda result: result.logprobs.__setitem__(0, -1),
        "slot 0: a logprob, and its row asked for none",
    ),
    "no counts": (lambda result: result.ClearField("top_counts"), "0 top_counts for 3 slots"),
    "another count": (
        lambda result: result.top_counts.__setitem__(slice(0, 3), [0, 2, 0]),
        "slot 1: another number of top logprobs",
    ),
    "counts with nothing behind them": (
        lambda result: (result.ClearField("top_token_ids"), result.ClearField("top_logprobs")),
        "0 top_token_ids and 0 top_logprobs of 2 due",
    ),
    "a top token without a value": (lambda result: result.top_logprobs.pop(), "2 top_token_ids and 1 top_logprobs"),
    "a top token outside the vocabulary": (
        lambda result: result.top_token_ids.__setitem__(0, 64),
        "a top token outside the vocabulary",
    ),
    "a top logprob that is no number": (
        lambda result: result.top_logprobs.__setitem__(1, math.nan),
        "a top logprob that is not a number",
    ),
}


@pytest.mark.parametrize(("mutate", "message"), WRONG_LOGPROBS.values(), ids=list(WRONG_LOGPROBS))
def test_logprobs_that_are_not_what_the_rows_asked_for_are_refused(mutate, message):
    checker, answer = logprobs_model()
    mutate(answer)
    with pytest.raises(ResultViolation, match=message):
        checker.answered(answer)


def test_logprobs_that_nobody_asked_for_are_refused(steps):
    for field, values in (("logprobs", [math.nan] * 6), ("top_counts", [0] * 6), ("top_token_ids", [1])):
        *_, checker = replayed(steps[:3])
        checker.apply(steps[3].plan.plan)
        answer = plan_pb2.StepResult.FromString(steps[3].result.result.SerializeToString())
        getattr(answer, field).extend(values)
        with pytest.raises(ResultViolation, match=rf"^step 4: .*{field}"):
            checker.answered(answer)


def test_logprobs_that_were_asked_for_pass():
    for failing in (False, True):
        checker, answer = logprobs_model(failing=failing)
        assert checker.answered(answer) == 3


@pytest.mark.parametrize("sent", [False, True])
def test_where_only_a_failed_row_asked_the_arrays_may_be_there_and_are_empty_of_values(sent):
    """The contract speaks of rows that asked: the built-in worker sends the arrays then, the fake one does not."""
    settings_ = [plan_pb2.SamplingSettings(top_p=1), plan_pb2.SamplingSettings(top_p=1, logprobs=True, top_logprobs=2)]
    admissions = [plan_pb2.Admission(slot=s, token_ids=[5], pages=[s], sampling=settings_[s]) for s in range(2)]
    checker = PlanChecker(SHAPE)
    checker.apply(plan_pb2.StepPlan(step=1, admissions=admissions, batch=plan_pb2.Batch(slots=[0, 1])))
    answer = plan_pb2.StepResult(step=1, slots=[0], token_ids=[9], failures=[plan_pb2.SlotFailure(slot=1)])
    if sent:
        answer.logprobs.append(math.nan)
        answer.top_counts.append(0)
    assert checker.answered(answer) == 1


def test_more_plans_without_an_answer_than_agreed_are_refused(tmp_path):
    recording = record_small_run(tmp_path / "run")  # agreed: three
    steps = list(recording.steps())
    for count, expected in ((3, ""), (4, "step 4: 4 plans without an answer, and plans_in_flight=3 was agreed")):
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
    expected = "step 12, slot 2: released as one of the request 'long', and it is another's (many:4)"
    assert check(recording).violation == expected


def test_a_slot_that_failed_has_no_token_and_runs_until_its_release(steps):
    checker = PlanChecker(SHAPE)
    for recorded in steps[:4]:
        checker.apply(recorded.plan.plan)
        answer = plan_pb2.StepResult.FromString(recorded.result.result.SerializeToString())
        if 3 in answer.slots:
            at = list(answer.slots).index(3)
            del answer.slots[at], answer.token_ids[at]
            answer.failures.add(slot=3, message="not a number")
        checker.answered(answer)
    assert checker.known[3] == checker.known[2]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_prefix_hashes_are_those_of_one_token_after_another(tokens):
    value, expected = 0, []
    for token in tokens:
        value = (value * FACTOR + token + 1) % 2**64
        expected.append(value)
    found = prefix_hashes(np.array(tokens, np.uint32))
    assert found.tolist() == expected
    assert next_hashes(found[:-1], np.array(tokens[1:], np.uint32)).tolist() == expected[1:]


def scores_model() -> tuple[PlanChecker, plan_pb2.StepResult]:
    """A checker that computed the first three of four prompt tokens in slot 0, and the right answer: three scores."""
    checker = PlanChecker(SHAPE)
    sampling = plan_pb2.SamplingSettings(top_p=1, prompt_logprobs=1)
    plan = plan_pb2.StepPlan(
        step=1,
        admissions=[plan_pb2.Admission(slot=0, token_ids=[2, 3, 4, 5], pages=[0], sampling=sampling)],
        batch=plan_pb2.Batch(slots=[0], token_counts=[3]),
    )
    checker.apply(plan)
    parts = [
        plan_pb2.PromptScores(start=1, logprobs=[-1], ranks=[2], top_token_ids=[7], top_logprobs=[-0.5]),
        plan_pb2.PromptScores(start=2, logprobs=[-1, -2], ranks=[1, 4], top_token_ids=[4, 9], top_logprobs=[-1, -1]),
    ]
    return checker, plan_pb2.StepResult(step=1, prompts=parts)


WRONG_SCORES = {
    "none": (lambda result: result.ClearField("prompts"), "slot 0: scores up to 1, due were 4"),
    "a part less": (lambda result: result.prompts.pop(), "slot 0: scores up to 2, due were 4"),
    "another place": (lambda result: setattr(result.prompts[0], "start", 2), "slot 0: scores of the token at 2"),
    "another slot": (lambda result: setattr(result.prompts[1], "slot", 3), "slot 3: scores of the token at 2"),
    "a rank less": (lambda result: result.prompts[1].ranks.pop(), "slot 0: scores of 2 tokens with arrays"),
    "no number": (lambda result: result.prompts[0].logprobs.__setitem__(0, math.nan), "a score that is not a number"),
    "no token": (lambda result: result.prompts[0].top_token_ids.__setitem__(0, 5000), "outside the vocabulary"),
}


def test_right_scores_of_a_prompt_pass():
    checker, result = scores_model()
    assert checker.answered(result) == 0


@pytest.mark.parametrize(("spoil", "message"), WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_wrong_scores_of_a_prompt(spoil, message):
    checker, result = scores_model()
    spoil(result)
    with pytest.raises(ResultViolation, match=message):
        checker.answered(result)


def test_scores_that_a_worker_does_not_have_are_not_asked_for(steps):
    settings = settings_of(prompt_logprobs=1)
    with pytest.raises(PlanViolation, match="prompt_logprobs, which the worker"):
        list(replayed(steps, 1, settings, replace(SHAPE, prompt_logprobs=False)))
