"""The fuzzer's plans keep the contract, by the scheduler's own checker, and hold all that it is meant to try."""

import numpy as np
import pytest

from bench.random_plans import RandomPlans
from services.common.packed import fill
from services.worker.api.codec import decode_plan
from services.worker.runner.plan import Limits, Plan
from tests.fakes.model import FakeModel, FakeShape
from tokasaurus.worker.v1 import plan_pb2

SHAPE = FakeShape(page_count=800, max_slots=32, max_tokens_per_step=200, max_context_tokens=500, eos_token_id=-1)
LIMITS = Limits(SHAPE.page_size, SHAPE.page_count, SHAPE.max_slots, 200, 500, SHAPE.vocab_size, 20, hydragen=True)


def encode(plan: Plan) -> plan_pb2.StepPlan:
    message = plan_pb2.StepPlan(step=plan.step)
    for name, values in (
        ("release_slots", plan.releases),
        ("append_slots", plan.append_slots),
        ("append_pages", plan.append_pages),
        ("copy_source_pages", plan.copy_sources),
        ("copy_target_pages", plan.copy_targets),
    ):
        fill(message, name, values)
    for each in plan.admissions:
        sampling = plan_pb2.SamplingSettings(
            **{
                name: getattr(each.sampling, name)
                for name in (
                    "temperature", "top_p", "top_k", "min_p", "seed", "sample_index", "logprobs", "top_logprobs",
                    "repetition_penalty", "frequency_penalty", "presence_penalty",
                )
            }
        )  # fmt: skip
        fill(sampling, "logit_bias_token_ids", each.sampling.bias_token_ids)
        fill(sampling, "logit_bias_values", each.sampling.bias_values)
        added = message.admissions.add(
            slot=each.slot, cached_tokens=each.cached_tokens, prompt_tokens=each.prompt_tokens, sampling=sampling
        )
        fill(added, "token_ids", each.token_ids)
        fill(added, "pages", each.pages)
    if plan.batch is not None:
        message.batch.SetInParent()
        fill(message.batch, "slots", plan.batch.slots)
        fill(message.batch, "token_counts", plan.batch.token_counts)
    if plan.groups is not None:
        message.hydragen.SetInParent()
        for name in ("starts", "counts", "prefix_pages"):
            fill(message.hydragen, name, getattr(plan.groups, name))
    return message


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
        message = encode(plan)
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
    first, second = ([encode(plans.next()[0]) for _ in range(50)] for plans in (RandomPlans(LIMITS, 7) for _ in "ab"))
    assert first == second
