"""The GPU's runner gives the CPU's tokens for models whose layers, or some of them, have a sliding window."""

import pytest

from services.common.plan.verdict import BrokenPlan
from tests.worker.interpreter import needs_triton
from tests.worker.no_streams import device_without_streams
from tests.worker.test_cuda_steps import CONFIG, PROMPTS, cuda, grouped_tokens, plain, prepare_groups

__all__ = ["cuda", "device_without_streams", "plain"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready", "device_without_streams")]

MODELS = {
    "every layer": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "one layer": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def config(request) -> dict:
    """Prompts, prefixes and answers of the tests are longer than the window."""
    return CONFIG | request.param


@pytest.mark.slow
def test_the_same_tokens_as_on_the_cpu(plain, cuda):
    expected = plain.generate(PROMPTS, 6, chunk=3, logprobs=True)
    driver = cuda(8, pieces=96)
    driver.reset()
    assert driver.generate(PROMPTS, 6, chunk=3, logprobs=True) == expected
    for slot, values in plain.logprobs.items():
        assert driver.logprobs[slot] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(("largest", "pieces"), [(0, 0), pytest.param(20, 32, marks=pytest.mark.slow)])
def test_groups_change_nothing_and_are_refused_if_every_layer_has_a_window(plain, cuda, largest, pieces, monkeypatch):
    prepare_groups(monkeypatch)
    driver = cuda(largest, pieces=pieces)
    if driver.runner.limits.window_tokens:
        with pytest.raises(BrokenPlan, match=r"WorkerInfo\.hydragen is false"):
            grouped_tokens(driver, grouped=True)
    else:
        assert grouped_tokens(driver, grouped=True) == grouped_tokens(plain, grouped=False)
