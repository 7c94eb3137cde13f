"""The fuzzer's plans keep the contract, by the scheduler's own checker, and hold all that it is meant to try."""

import numpy as np
import pytest

from bench.random_plans import RandomPlans
from services.common.plan.codec import decode_plan, encode_plan
from tests.fakes.model import FakeModel, FakeShape

SHAPE = FakeShape(page_count=800, max_slots=32, max_tokens_per_step=200, max_context_tokens=500, eos_token_id=-1)
LIMITS = SHAPE.limits


@pytest.mark.parametrize("seed", range(4))
def test_every_plan_keeps_the_contract(seed):
    model, plans = FakeModel(SHAPE), RandomPlans(LIMITS, seed)
    seen = dict.fromkeys(("groups", "chunks", "copies", "kept batches", "kept groups", "shared", "empty"), 0)
    largest = 0
    for number in range(800):
        if number == 500:
            model = FakeModel(SHAPE)
            plans.reset()
        plan, expected = plans.next()
        message = encode_plan(plan)
        assert len(decode_plan(message).admissions) == len(plan.admissions)
        result = model.apply(message)
        assert np.array_equal(np.array(result.slots), expected.slots)
        seen["groups"] += plan.groups is not None and len(plan.groups) > 0
        seen["kept groups"] += plan.groups is None and len(plans.groups) > 0
        seen["chunks"] += plans.tokens_in_batch > plans.rows_in_batch
        seen["copies"] += len(plan.copy_sources) > 0
        seen["kept batches"] += plan.batch is None
        seen["shared"] += any(each.cached_tokens for each in plan.admissions)
        seen["empty"] += plans.rows_in_batch == 0
        largest = max(largest, plans.rows_in_batch)
    assert min(seen.values()) > 0, seen
    assert largest == SHAPE.max_slots


def test_equal_seeds_give_equal_plans():
    first, second = (
        [encode_plan(plans.next()[0]) for _ in range(50)] for plans in (RandomPlans(LIMITS, 7) for _ in "ab")
    )
    assert first == second
