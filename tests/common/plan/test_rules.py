"""The worker, the recorder and the fake worker give the verdicts of one judge."""

import dataclasses
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fuzz.illegal import spoilt
from bench.random_plans import RandomPlans
from services.common.errors import FailedPrecondition, InvalidRequest
from services.common.plan.codec import decode_limits, decode_plan, encode_plan
from services.common.plan.rules import check_plan
from services.common.plan.slots import SlotState
from services.common.plan.types import NO_ROWS, Admission, Batch, Groups, LastPlan, Plan, WorkerLimits
from services.common.plan.verdict import BrokenPlan, StalePlan, has_repeats
from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.violation import Violation
from services.worker.step.slots import SlotTable
from tests.fakes.model import FakeModel, FakeShape
from tests.properties import examples
from tests.worker.driver import admission, batch
from tokasaurus.worker.v1 import plan_pb2

SHAPE = FakeShape(
    page_size=4, page_count=200, max_slots=8, max_tokens_per_step=60, max_context_tokens=50, eos_token_id=-1
)


class WorkerSide:
    """The steps of a worker's runner without a model."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits, self.slots, self.last = limits, SlotTable(limits, torch.device("cpu")), LastPlan()

    def apply(self, message: plan_pb2.StepPlan) -> None:
        plan = decode_plan(message)
        check_plan(plan, self.last, self.slots, self.limits)
        if plan.releases.size:
            self.slots.release(plan.releases)
        for each in plan.admissions:
            self.slots.admit(each)
        if plan.append_slots.size:
            self.slots.append_pages(plan.append_slots, plan.append_pages)
        self.last = self.last.followed_by(plan)
        rows, counts = self.last.batch.slots, self.last.batch.token_counts
        ends = self.slots.computed[rows] + counts
        self.slots.advance(rows, counts, rows[ends == self.slots.known[rows]])


def verdict_of(side, message: plan_pb2.StepPlan) -> str:
    """The judge's message as ``side`` reports it, empty if it takes the plan."""
    try:
        side.apply(message)
    except (InvalidRequest, FailedPrecondition) as error:
        return error.message
    except Violation as violation:
        return violation.message if isinstance(violation.__cause__, BrokenPlan | StalePlan) else "pages"
    return ""


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 25))
def test_worker_recorder_and_fake_give_the_same_verdict_on_random_plans(seed, length):
    info, random = SHAPE.worker_info(), Random(seed)
    worker, recorder, fake = WorkerSide(decode_limits(info)), PlanChecker(decode_limits(info)), FakeModel(SHAPE)
    plans = RandomPlans(SHAPE.limits, seed)
    for _ in range(length):
        message = encode_plan(plans.next()[0])
        for side in (worker, fake):
            assert verdict_of(side, message) == ""
        assert verdict_of(recorder, message) == ""
        recorder.result_received(None)
    following = encode_plan(plans.next()[0])
    used = [int(slot) for slot in worker.slots.used.nonzero()[0]]
    _, broken = spoilt(random, following, info, used)
    found = verdict_of(worker, broken)
    in_pages = {"pages"} if not found else set()  # the contents of pages are the recorder's own
    assert verdict_of(recorder, broken) in {found} | in_pages
    assert verdict_of(fake, broken) in {found} | in_pages


LIMITS = WorkerLimits(
    page_size=4, page_count=64, max_slots=4, max_tokens_per_step=64, max_context_tokens=10, vocab_size=100,
    max_top_logprobs=5,
)  # fmt: skip


def judge(*admissions: Admission, rows: Batch = NO_ROWS, limits: WorkerLimits = LIMITS) -> None:
    check_plan(Plan(1, admissions=admissions, batch=rows), LastPlan(), SlotState(limits), limits)


def test_a_prompt_may_fill_the_context():
    judge(admission(0, range(10), range(3)), rows=batch([0], [10]))
    with pytest.raises(BrokenPlan, match="11 tokens, expected 1 to max_context_tokens=10"):
        judge(admission(0, range(11), range(3)))


def test_a_page_table_is_no_longer_than_the_context():
    with pytest.raises(BrokenPlan, match="4 pages, at most 3 hold max_context_tokens=10") as caught:
        judge(admission(0, range(10), range(4)))
    assert (caught.value.field, caught.value.slot) == ("plan.admissions[0].pages", 0)


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("processed_logprobs", {"processed_logprobs": True}),
        ("grammars", {"grammar": "start: /a/"}),
    ],
)
def test_a_worker_refuses_what_its_info_says_that_it_lacks(capability, wanted):
    judge(admission(0, range(5), range(2), **wanted), limits=dataclasses.replace(LIMITS, **{capability: True}))
    with pytest.raises(BrokenPlan, match=rf"WorkerInfo\.{capability} is false"):
        judge(admission(0, range(5), range(2), **wanted), limits=dataclasses.replace(LIMITS, **{capability: False}))


@pytest.mark.parametrize("values", [[], [3], [3, 1, 2], [3, 1, 3], [0, 0]])
def test_repeats_are_found(values):
    assert has_repeats(np.array(values, np.int64)) is (len({*values}) < len(values))


def test_a_worker_with_a_window_takes_no_groups():
    limits = dataclasses.replace(LIMITS, hydragen=True, window_tokens=8)
    with pytest.raises(BrokenPlan, match=r"WorkerInfo\.window_tokens is 8: leave them out"):
        check_plan(Plan(1, groups=Groups(*[np.ones(1, np.int64)] * 3)), LastPlan(), SlotState(limits), limits)
