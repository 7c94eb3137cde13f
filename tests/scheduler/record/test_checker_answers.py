"""The checker lets every right answer pass, and none that does not fit its plan."""

import math
from dataclasses import replace

import pytest

from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.violation import Violation
from tests.fakes.model import FakeModel
from tests.scheduler.record.checking import replayed, settings_of
from tests.scheduler.record.loop import SHAPE
from tokasaurus.worker.v1 import plan_pb2

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
    with pytest.raises(Violation, match="step 4"):
        checker.result_received(answer)


def logprobs_model(*, failing: bool = False) -> tuple[PlanChecker, plan_pb2.StepResult]:
    """A checker whose plan is applied, and the right answer to it: slot 0 asks for nothing, slot 1 for its logprob,
    slot 2 for its own and two others; slot 3, if ``failing``, asks for three and fails.
    """
    wanted = [(False, 0), (True, 0), (True, 2), (True, 3)][: 3 + failing]
    admissions = [
        plan_pb2.Admission(
            slot=slot, token_ids=[slot + 5], pages=[slot],
            sampling=plan_pb2.SamplingSettings(parameters={}, logprobs=own, top_logprobs=top),
        )
        for slot, (own, top) in enumerate(wanted)
    ]  # fmt: skip
    batch = plan_pb2.Batch(slots=range(len(wanted)))
    plan = plan_pb2.StepPlan(step=1, admissions=admissions, batch=batch)
    model, checker = FakeModel(SHAPE), PlanChecker(SHAPE.limits)
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
    with pytest.raises(Violation, match=message):
        checker.result_received(answer)


def test_logprobs_that_nobody_asked_for_are_refused(steps):
    for field, values in (("logprobs", [math.nan] * 6), ("top_counts", [0] * 6), ("top_token_ids", [1])):
        *_, checker = replayed(steps[:3])
        checker.apply(steps[3].plan.plan)
        answer = plan_pb2.StepResult.FromString(steps[3].result.result.SerializeToString())
        getattr(answer, field).extend(values)
        with pytest.raises(Violation, match=rf"^step 4: .*{field}"):
            checker.result_received(answer)


def test_logprobs_that_were_asked_for_pass():
    for failing in (False, True):
        checker, answer = logprobs_model(failing=failing)
        assert checker.result_received(answer) == 3


@pytest.mark.parametrize("sent", [False, True])
def test_where_only_a_failed_row_asked_the_arrays_may_be_there_and_are_empty_of_values(sent):
    """The contract speaks of rows that asked: the built-in worker sends the arrays then, the fake one does not."""
    settings_ = [
        plan_pb2.SamplingSettings(parameters={}),
        plan_pb2.SamplingSettings(parameters={}, logprobs=True, top_logprobs=2),
    ]
    admissions = [plan_pb2.Admission(slot=s, token_ids=[5], pages=[s], sampling=settings_[s]) for s in range(2)]
    checker = PlanChecker(SHAPE.limits)
    checker.apply(plan_pb2.StepPlan(step=1, admissions=admissions, batch=plan_pb2.Batch(slots=[0, 1])))
    answer = plan_pb2.StepResult(step=1, slots=[0], token_ids=[9], failures=[plan_pb2.SlotFailure(slot=1)])
    if sent:
        answer.logprobs.append(math.nan)
        answer.top_counts.append(0)
    assert checker.result_received(answer) == 1


def test_a_slot_that_failed_has_no_token_and_runs_until_its_release(steps):
    checker = PlanChecker(SHAPE.limits)
    for recorded in steps[:4]:
        checker.apply(recorded.plan.plan)
        answer = plan_pb2.StepResult.FromString(recorded.result.result.SerializeToString())
        if 3 in answer.slots:
            at = list(answer.slots).index(3)
            del answer.slots[at], answer.token_ids[at]
            answer.failures.add(slot=3, message="not a number")
        checker.result_received(answer)
    assert checker.slots.known[3] == checker.slots.known[2]


def scores_model() -> tuple[PlanChecker, plan_pb2.StepResult]:
    """A checker that computed the first three of four prompt tokens in slot 0, and the right answer: three scores."""
    checker = PlanChecker(SHAPE.limits)
    sampling = plan_pb2.SamplingSettings(parameters={}, prompt_logprobs=1)
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
    assert checker.result_received(result) == 0


@pytest.mark.parametrize(("spoil", "message"), WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_wrong_scores_of_a_prompt(spoil, message):
    checker, result = scores_model()
    spoil(result)
    with pytest.raises(Violation, match=message):
        checker.result_received(result)


def test_scores_that_a_worker_does_not_have_are_not_asked_for(steps):
    settings = settings_of(prompt_logprobs=1)
    with pytest.raises(Violation, match=r"WorkerInfo\.prompt_logprobs is false"):
        list(replayed(steps, 1, settings, replace(SHAPE, prompt_logprobs=False)))


@pytest.mark.parametrize(("count", "good"), [(3, True), (1, True), (0, False), (4, False)])
def test_a_row_with_processed_logprobs_may_have_fewer_tokens(count, good):
    """Those that can be drawn: one at least."""
    sampling = plan_pb2.SamplingSettings(
        parameters={"temperature": 0}, logprobs=True, top_logprobs=3, processed_logprobs=True
    )
    admission = plan_pb2.Admission(slot=0, token_ids=[5], pages=[0], sampling=sampling)
    checker = PlanChecker(SHAPE.limits)
    checker.apply(plan_pb2.StepPlan(step=1, admissions=[admission], batch=plan_pb2.Batch(slots=[0])))
    answer = plan_pb2.StepResult(step=1, slots=[0], token_ids=[9], logprobs=[-0.5], top_counts=[count])
    answer.top_token_ids.extend(range(count))
    answer.top_logprobs.extend([-1.0] * count)
    if good:
        assert checker.result_received(answer) == 1
        return
    with pytest.raises(Violation, match="another number of top logprobs"):
        checker.result_received(answer)


@pytest.mark.parametrize("start", [1, 2, 3])
def test_scores_are_due_from_their_start(start):
    sampling = plan_pb2.SamplingSettings(parameters={}, prompt_logprobs=0, prompt_logprobs_start=start)
    admission = plan_pb2.Admission(slot=0, token_ids=[5, 6, 7, 8], pages=[0], sampling=sampling)
    checker = PlanChecker(SHAPE.limits)
    batch = plan_pb2.Batch(slots=[0], token_counts=[4])
    checker.apply(plan_pb2.StepPlan(step=1, admissions=[admission], batch=batch))
    answer = plan_pb2.StepResult(step=1, slots=[0], token_ids=[9])
    answer.prompts.add(slot=0, start=2, logprobs=[-1.0, -1.0], ranks=[1, 1])
    if start == 2:
        assert checker.result_received(answer) == 1
        return
    with pytest.raises(Violation, match="scores"):
        checker.result_received(answer)


@pytest.mark.parametrize(
    ("settings", "without", "message"),
    [
        ({"processed_logprobs": True}, {"processed_logprobs": False}, "WorkerInfo.processed_logprobs is false"),
        ({"thinking": {"tokens": 1}}, {"thinking_budgets": False}, "WorkerInfo.thinking_budgets is false"),
        ({"thinking": {"end_token_id": 64}}, {}, "thinking.end_token_id: token 64 is out of range"),
        ({"prompt_logprobs": 0, "prompt_logprobs_start": 99}, {}, "prompt_logprobs_start=99: expected less than"),
    ],
)
def test_settings_that_the_worker_does_not_take_are_refused(steps, settings, without, message):
    with pytest.raises(Violation, match=message):
        list(replayed(steps, 1, settings_of(**settings), replace(SHAPE, **without)))
