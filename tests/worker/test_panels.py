"""Weights in panels on CPUs with activations in float32, against plain layers with the same weights."""

import pytest
import torch

from services.common.config import WorkerConfig
from services.worker.boot.common import boot
from services.worker.layers import pairs_cpu, products_cpu, tiles_cpu
from services.worker.layers.linear import Linear
from services.worker.layers.panels import PanelLinear
from services.worker.models import fused_cpu
from services.worker.models.decoder import DecoderModel
from tests.quick import quick_if
from tests.worker.driver import Driver
from tests.worker.small_models import one_sequence
from tests.worker.test_quantization import fill

OUTPUTS = [64, [40, 30], [128, 64, 64], 1]
PROMPTS = ([3 + index * 7 % 300 for index in range(90)], [5, 6], list(range(20, 40)))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, "none", 4),
        (torch.float32, "none", 1),
        (torch.bfloat16, "tiles", 4),
        (torch.bfloat16, "pairs", 4),
        (torch.bfloat16, "none", 4),
        (torch.bfloat16, "none", 1),
    ],
    ids=[
        "float32",
        "float32, few registers",
        "bfloat16, tiles",
        "bfloat16, pairs",
        "bfloat16, widened",
        "bfloat16, few registers",
    ],
)
def dtype(request):
    """Compile products for processors with different instructions for bfloat16, and with few registers.

    Return the dtype of weights.
    """
    stored, instructions, rows = request.param
    tiles, pairs = instructions == "tiles", instructions == "pairs"
    if (tiles and not tiles_cpu.multiplies_tiles()) or (pairs and not pairs_cpu.multiplies_bfloat16()):
        pytest.skip(f"this processor has no instructions for {instructions} of bfloat16")
    caches = products_cpu.make_product, products_cpu.compiled_product
    for each in caches:
        each.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(products_cpu, "multiplies_tiles", lambda: tiles)
        patched.setattr(pairs_cpu, "multiplies_bfloat16", lambda: pairs)
        patched.setattr(products_cpu, "most_rows", lambda: rows)
        yield stored
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize("outputs", quick_if(lambda outputs: outputs in (1, [40, 30]), OUTPUTS))
@pytest.mark.parametrize("inputs", [2, 300, pytest.param(1026, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", quick_if({1, 3, 5, 8, 33, 130}.__contains__, [1, 2, 3, 4, 5, 7, 8, 13, 33, 130]))
def test_a_product_is_that_of_rounded_values(rows, inputs, outputs, dtype):
    width = outputs if isinstance(outputs, int) else sum(outputs)
    x, weight, bias = random(rows, inputs, seed=1), random(width, inputs), random(width, seed=2)
    linear = fill(PanelLinear(inputs, outputs, bias=True, dtype=dtype), weight, bias)
    expected = x.to(dtype).float() @ weight.to(dtype).float().t() + bias
    torch.testing.assert_close(linear(x), expected, atol=2e-4, rtol=0)
    total = random(rows, width, seed=3)
    assert linear(x, total) is total
    torch.testing.assert_close(total, random(rows, width, seed=3) + expected, atol=2e-4, rtol=0)


def test_a_row_has_the_same_result_among_any_rows(dtype):
    """Processors with few registers multiply 32 or more rows of float32 with torch's library, whose results differ."""
    rows = 31 if dtype == torch.float32 and products_cpu.most_rows() == 1 else 37
    linear, x = fill(PanelLinear(300, 100, dtype=dtype), random(100, 300), None), random(rows, 300, seed=1)
    together = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(rows))
    assert torch.equal(linear(x[3:23]), together[3:23])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_reaches_its_own_row_or_output_only(bad, dtype):
    weight, x = random(10, 64), random(3, 64, seed=1)
    weight[3, 40] = bad
    linear = fill(PanelLinear(64, 10, dtype=dtype), weight, None)
    assert linear(x).isfinite().all(dim=0).tolist() == [i != 3 for i in range(10)]
    x[1, 7] = bad
    linear = fill(PanelLinear(64, 10, dtype=dtype), random(10, 64), None)
    assert linear(x).isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_stored_and_read_by_part(stored):
    linear, weight = PanelLinear(6, [70, 30], dtype=stored), random(100, 6)
    fill(linear, weight, None)
    rows = torch.empty(20, 6)
    linear.targets("first", "second")["second.weight"].copy_to(rows)
    assert torch.equal(rows, weight[70:90].to(stored).float())
    assert torch.equal(linear.columns(torch.tensor([99, 0])), weight[[99, 0]].to(stored))


def as_floats(model: DecoderModel) -> DecoderModel:
    """Replace the layers of ``model`` by plain ones with the same weights in float32. Return it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PanelLinear) and name != "_lookup":
                plain = Linear(child.inputs, child.outputs)
                with torch.no_grad():
                    plain.weight.copy_(child.columns(torch.arange(child.width)).t())
                plain.bias = child.bias
                setattr(parent, name, plain)
    return model


@pytest.mark.parametrize(
    ("stored", "error", "tied", "architecture"),
    quick_if(
        lambda stored, error, tied, architecture: stored == "float32" or (tied, architecture) == (False, "llama"),
        [
            (*stored, tied, architecture)
            for stored in [("float32", 1e-4), ("bfloat16", 0.05)]
            for tied in (True, False)
            for architecture in ("llama", "qwen2", "qwen3")
        ],
    ),
)
def test_decoding_agrees_with_plain_layers_in_float32(architecture, tied, stored, error, checkpoint, monkeypatch):
    calls, call = [], fused_cpu.FusedDecoder.__call__
    monkeypatch.setattr(
        fused_cpu.FusedDecoder, "__call__", lambda *arguments: calls.append(arguments) or call(*arguments)
    )
    flags = {"device": "cpu", "kv_cache_num_tokens": 4096, "torch_num_threads": 2, "dtype": stored}
    booted = boot(WorkerConfig(model=str(checkpoint(architecture, tied=tied)), **flags))
    assert booted.dtype == stored
    assert booted.runner.cache.all_keys.dtype == getattr(torch, stored)
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
        # In bfloat16, inputs of products, keys and values are rounded.
        found = torch.tensor(driver.logprobs[slot])
        torch.testing.assert_close(found, expected[torch.arange(12), tokens], rtol=0, atol=error)
        assert (expected.max(-1).values - found < 2 * error).all()
    booted.runner.close()


def test_other_models_keep_their_dtype(checkpoint):
    model = checkpoint("qwen3_moe")
    booted = boot(WorkerConfig(model=str(model), device="cpu", dtype="bfloat16", kv_cache_num_tokens=4096))
    assert booted.loaded.model.embedding.dtype == torch.bfloat16
    booted.runner.close()
