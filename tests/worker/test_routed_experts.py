"""Experts of tokens are those of transformers, and only requests that ask get them."""

import numpy as np
import pytest
import torch

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.plan.routed_experts import RoutedExpertsLayout
from services.common.plan.verdict import BrokenPlan
from services.worker.attention.kv_cache import KvCache
from services.worker.boot.common import boot
from services.worker.described.layer import ExpertsConfig
from services.worker.described.memory import page_bytes, routed_layout
from tests.worker.driver import admission, batch
from tests.worker.parallel.cases import prompt_of
from tests.worker.routed import Received, asking, expected_experts
from tests.worker.small_models import CPU, small_config

PAGE = 16
LAYERS, CHOSEN = 3, 3


@pytest.fixture
def directory(checkpoint):
    return checkpoint("qwen3_moe")


@pytest.fixture
def driver(runner_for, directory):
    return runner_for(directory, return_routed_experts=True)


@pytest.fixture
def received() -> Received:
    return Received(LAYERS, CHOSEN)


def test_the_worker_announces_the_form_of_experts(driver):
    assert driver.runner.limits.routed_experts == RoutedExpertsLayout(LAYERS, CHOSEN, 1)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 45])
def test_experts_of_prompt_and_answer_are_those_of_transformers(length, driver, directory, reference, received):
    prompt = prompt_of(length)
    received.take(driver.run(admissions=(asking(0, prompt, range(4)),), batch=batch([0], [length])))
    for _ in range(5):
        received.take(driver.run(batch=batch([0])))
    tokens = prompt + driver.tokens[0][:-1]  # the last one is never computed
    np.testing.assert_array_equal(received.of(0), expected_experts(reference(directory), tokens))


@pytest.mark.parametrize(
    "flags", [{}, pytest.param({"torch_compile": True}, marks=pytest.mark.slow)], ids=["plain", "compiled"]
)
def test_a_prompt_in_chunks_beside_rows_that_ask_and_rows_that_do_not(
    flags, runner_for, directory, reference, received
):
    driver = runner_for(directory, return_routed_experts=True, **flags)
    long, short, quiet = prompt_of(45, 1), prompt_of(9, 2), prompt_of(20, 3)
    first = (asking(0, long, range(4)), admission(1, quiet, range(4, 8)))
    received.take(driver.run(admissions=first, batch=batch([0, 1], [17, 20])))
    received.take(driver.run(admissions=(asking(2, short, range(8, 10)),), batch=batch([1, 0, 2], [1, 17, 9])))
    received.take(driver.run(batch=batch([2, 0, 1], [1, 11, 1])))
    received.take(driver.run(batch=batch([0, 1, 2])))
    for slot, prompt in ((0, long), (2, short)):
        tokens = prompt + driver.tokens[slot][:-1]
        np.testing.assert_array_equal(received.of(slot), expected_experts(reference(directory), tokens))
    assert 1 not in received


def test_cached_and_copied_pages_have_the_experts_of_the_request_that_computed_them(
    driver, directory, reference, received
):
    prompt = prompt_of(PAGE + 5)
    driver.run(admissions=(admission(0, prompt, [3, 7]),), batch=batch([0], [len(prompt)]))  # it does not ask
    cached = len(prompt) - 1
    siblings = (
        asking(1, prompt, [3, 8], cached_tokens=cached),
        asking(2, prompt, [3, 9], 5, cached_tokens=cached, sample_index=1),
        asking(3, prompt, [3, 10], len(prompt), cached_tokens=cached, sample_index=2),
    )
    copies = {"copy_sources": [7, 7, 7], "copy_targets": [8, 9, 10]}
    received.take(driver.run(admissions=siblings, batch=batch([1, 2, 3]), **copies))
    received.take(driver.run(batch=batch([1, 2, 3])))
    for slot, start in ((1, 0), (2, 5), (3, len(prompt))):
        expected = expected_experts(reference(directory), prompt + driver.tokens[slot][:-1])
        np.testing.assert_array_equal(received.of(slot, start), expected[start:])


def test_a_sequence_that_was_preempted_sends_the_rest_only(driver, directory, reference, received):
    prompt = prompt_of(PAGE + 1)
    received.take(driver.run(admissions=(asking(0, prompt, [0, 1]),), batch=batch([0], [len(prompt)])))
    received.take(driver.run(batch=batch([0])))
    before = received.of(0)
    tokens = prompt + driver.tokens.pop(0)
    again = asking(5, tokens, [4, 2], len(before))
    received.take(driver.run(releases=[0], admissions=(again,), batch=batch([5], [len(tokens)])))
    received.take(driver.run(batch=batch([5])))
    expected = expected_experts(reference(directory), tokens + driver.tokens[5][:-1])
    np.testing.assert_array_equal(before, expected[: len(before)])
    np.testing.assert_array_equal(received.of(5, len(before)), expected[len(before) :])


def test_a_slot_that_is_used_again_does_not_ask(driver):
    driver.run(admissions=(asking(0, [5], [0]),), batch=batch([0]))
    output = driver.run(releases=[0], admissions=(admission(0, [5], [0]),), batch=batch([0]))
    assert output.routed is None


def test_a_worker_without_the_flag_refuses_to_send_experts(runner_for, directory):
    driver = runner_for(directory)
    assert driver.runner.limits.routed_experts is None
    with pytest.raises(BrokenPlan, match=r"but this worker's WorkerInfo\.routed_experts is unset"):
        driver.run(admissions=(asking(0, [5], [0]),), batch=batch([0]))


@pytest.mark.parametrize(("count", "layout"), [(256, (2, 3, 1)), (257, (2, 3, 2))])
def test_the_size_of_a_page_counts_its_experts(count, layout):
    model = small_config(2, mlp=ExpertsConfig(count=count, chosen=3, width=16))
    routed = routed_layout(model)
    assert (routed.layers, routed.experts_per_token, routed.bytes_per_expert) == layout
    shape = {"layers": 2, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "dtype": torch.float32}
    cache = KvCache(page_count=4, page_size=PAGE, device=CPU, routed=routed, **shape)
    kept = cache.routed_experts[:-1].nbytes  # the last page is for padding
    assert kept == 4 * (page_bytes(model, PAGE, 4, routed=True) - page_bytes(model, PAGE, 4))
    assert kept == 4 * PAGE * routed.token_bytes


@pytest.mark.parametrize(
    ("architecture", "flags", "message"),
    [
        ("qwen3", {}, "return_routed_experts=T: the model has no experts, only dense layers"),
        ("qwen3_moe", {"model_impl": "transformers"}, "Qwen3MoeForCausalLM are those of transformers"),
    ],
)
def test_models_whose_experts_cannot_be_read_refuse_the_flag(architecture, flags, message, checkpoint):
    config = WorkerConfig(model=str(checkpoint(architecture)), device="cpu", return_routed_experts=True, **flags)
    with pytest.raises(InvalidRequest, match=message):
        boot(config)


def test_pipeline_stages_refuse_the_flag():
    with pytest.raises(ValueError, match="return_routed_experts=T: not with pp_size=2"):
        WorkerConfig(model="m", pp_size=2, return_routed_experts=True)
