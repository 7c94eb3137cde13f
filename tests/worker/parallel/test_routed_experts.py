"""Experts of tokens on several ranks: one rank reports those of transformers."""

import numpy as np
import pytest

from tests.quick import quick_if
from tests.worker.driver import Driver, batch
from tests.worker.parallel.cases import SIZES, prompt_of
from tests.worker.routed import Received, asking, expected_experts


@pytest.mark.parametrize(
    ("expert_parallel", "sharded"),
    quick_if(
        lambda expert_parallel, sharded: expert_parallel == (sharded == 1),
        [(False, 10**6), (False, 1), (True, 10**6), (True, 1)],
    ),
)
def test_ranks_return_the_experts_of_transformers(expert_parallel, sharded, checkpoint, reference, replica_of):
    directory = checkpoint("qwen3_moe", **SIZES)
    flags = {"return_routed_experts": True, "expert_parallel": expert_parallel}
    driver, received = Driver(replica_of(2, 1, directory, sharded, **flags)), Received(4, 3)
    prompts = {0: prompt_of(45, 1), 1: prompt_of(17, 2)}
    asked = tuple(asking(slot, prompt, range(4 * slot, 4 * slot + 4)) for slot, prompt in prompts.items())
    received.take(driver.run(admissions=asked, batch=batch([0, 1], [20, 17])))
    received.take(driver.run(batch=batch([0, 1], [25, 1])))
    received.take(driver.run(batch=batch([0, 1])))
    for slot, prompt in prompts.items():
        expected = expected_experts(reference(directory), prompt + driver.tokens[slot][:-1])
        np.testing.assert_array_equal(received.of(slot), expected)
