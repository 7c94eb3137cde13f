"""Weights in bfloat16 on CPUs with activations in float32, against the same weights in float32."""

import pytest
import torch

from services.common.config import WorkerConfig
from services.worker.boot.common import boot
from services.worker.layers import pairs_cpu
from services.worker.layers.linear import Linear
from services.worker.layers.pairs import PairedLinear
from services.worker.models import fused_cpu
from services.worker.models.decoder import DecoderModel
from tests.worker.driver import Driver
from tests.worker.small_models import one_sequence
from tests.worker.test_quantization import fill

PROMPTS = ([3 + index * 7 % 300 for index in range(90)], [5, 6], list(range(20, 40)))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@pytest.fixture(
    scope="module", params=[(True, 4), (False, 4), (False, 1)], ids=["bfloat16", "float32", "few registers"]
)
def processor(request):
    """Compile products for processors with and without instructions for bfloat16, and with few registers."""
    has_instruction, rows = request.param
    if has_instruction and not pairs_cpu.multiplies_bfloat16():
        pytest.skip("this processor has no instruction for products of bfloat16")
    pairs_cpu.compiled_product.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pairs_cpu, "multiplies_bfloat16", lambda: has_instruction)
        patched.setattr(pairs_cpu, "most_rows", lambda: rows)
        yield
    pairs_cpu.compiled_product.cache_clear()


@pytest.mark.parametrize("outputs", [64, [40, 30], [128, 64, 64], 1])
@pytest.mark.parametrize("inputs", [2, 300])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 33])
def test_a_product_is_that_of_rounded_values(rows, inputs, outputs, processor):
    width = outputs if isinstance(outputs, int) else sum(outputs)
    x, weight, bias = random(rows, inputs, seed=1), random(width, inputs), random(width, seed=2)
    linear = fill(PairedLinear(inputs, outputs, bias=True), weight, bias)
    expected = rounded(x) @ rounded(weight).t() + bias
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=0)
    total = random(rows, width, seed=3)
    assert linear(x, total) is total
    torch.testing.assert_close(total, random(rows, width, seed=3) + expected, atol=1e-4, rtol=0)


def test_a_row_has_the_same_result_among_any_rows(processor):
    linear, x = fill(PairedLinear(300, 100), random(100, 300), None), random(7, 300, seed=1)
    together = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(7))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_reaches_its_own_row_or_output_only(bad, processor):
    weight, x = random(10, 64), random(3, 64, seed=1)
    weight[3, 40] = bad
    assert fill(PairedLinear(64, 10), weight, None)(x).isfinite().all(dim=0).tolist() == [i != 3 for i in range(10)]
    x[1, 7] = bad
    assert fill(PairedLinear(64, 10), random(10, 64), None)(x).isfinite().all(dim=1).tolist() == [True, False, True]


def test_weights_are_stored_and_read_by_part():
    linear, weight = PairedLinear(6, [70, 30]), random(100, 6)
    fill(linear, weight, None)
    rows = torch.empty(20, 6)
    linear.targets("first", "second")["second.weight"].copy_to(rows)
    assert torch.equal(rows, rounded(weight[70:90]))
    assert torch.equal(linear.columns(torch.tensor([99, 0])), weight[[99, 0]].bfloat16())


def as_floats(model: DecoderModel) -> DecoderModel:
    """Replace the layers of ``model`` by plain ones with the same weights in float32. Return it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PairedLinear) and name != "_lookup":
                plain = Linear(child.inputs, child.outputs)
                with torch.no_grad():
                    plain.weight.copy_(child.columns(torch.arange(child.width)).t())
                plain.bias = child.bias
                setattr(parent, name, plain)
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_decoding_agrees_with_the_same_weights_in_float32(architecture, tied, checkpoint, monkeypatch):
    calls, call = [], fused_cpu.FusedDecoder.__call__
    monkeypatch.setattr(
        fused_cpu.FusedDecoder, "__call__", lambda *arguments: calls.append(arguments) or call(*arguments)
    )
    flags = {"device": "cpu", "kv_cache_num_tokens": 4096, "torch_num_threads": 2, "dtype": "bfloat16"}
    booted = boot(WorkerConfig(model=str(checkpoint(architecture, tied=tied)), **flags))
    assert booted.dtype == "bfloat16"
    assert booted.runner.cache.all_keys.dtype == torch.bfloat16
    driver = Driver(booted.runner)
    answers = driver.generate(list(PROMPTS), 12, logprobs=True)
    assert calls
    model = as_floats(booted.loaded.model)
    for slot, (prompt, tokens) in enumerate(zip(PROMPTS, answers, strict=True)):
        sequence = torch.tensor(prompt + tokens)
        _, step = one_sequence(model.config, len(sequence))
        with torch.inference_mode():
            logits = model.logits(model(sequence, torch.arange(len(sequence)), step))[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        # Inputs of products, keys and values are rounded to bfloat16.
        found = torch.tensor(driver.logprobs[slot])
        torch.testing.assert_close(found, expected[torch.arange(12), tokens], rtol=0, atol=0.05)
        assert (expected.max(-1).values - found < 0.1).all()
    booted.runner.close()


def test_other_models_keep_their_dtype(checkpoint):
    model = checkpoint("qwen3_moe")
    booted = boot(WorkerConfig(model=str(model), device="cpu", dtype="bfloat16", kv_cache_num_tokens=4096))
    assert booted.loaded.model.embedding.dtype == torch.bfloat16
    booted.runner.close()
