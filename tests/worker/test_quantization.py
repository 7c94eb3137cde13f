"""8-bit weights and activations."""

import numpy as np
import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.model.json_object import read_json
from services.worker.described.registry import read_model_config
from services.worker.layers.factory import make_linear
from services.worker.layers.fp8 import FP8, Fp8Linear, quantize_rows, refuse_unquantizable, scaled_product
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.linear import Linear
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel
from tests.checkpoints import ARCHITECTURES
from tests.quick import quick_if
from tests.worker.driver import Driver, admission, batch
from tests.worker.parallel.jobs import run_on
from tests.worker.small_models import CPU, one_sequence, small_config, small_model


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_value_is_off_by_a_sixteenth_of_itself_at_most(size):
    x = random(200, 64) * size
    rows, scale = quantize_rows(x)
    assert rows.dtype == FP8
    assert rows.float().abs().amax(dim=-1).tolist() == [448] * 200
    # Below the smallest normal value steps no longer shrink with the value.
    assert ((rows.float() * scale - x).abs() <= x.abs() / 16 + scale * 2**-10).all()


def test_rows_of_zeros_stay_zeros():
    rows, scale = quantize_rows(torch.zeros(2, 16))
    assert (rows.float() * scale == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row_alone(bad):
    x = random(3, 32)
    x[1, 5] = bad
    linear = fill(Fp8Linear(32, 16, dtype=torch.float32), random(16, 32))
    assert linear(quantize_rows(x)).isfinite().all(dim=1).tolist() == [True, False, True]
    assert not linear(quantize_rows(x))[1].isfinite().any()


def fill(linear: torch.nn.Module, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Module:
    """Copy the parts of a checkpoint into ``linear``, and return it."""
    names = [str(number) for number in range(len(linear.outputs))]
    targets = linear.targets(*names)
    for name, part in zip(names, weight.split(linear.outputs), strict=True):
        targets[f"{name}.weight"].copy_(part)
    if bias is not None:
        for name, part in zip(names, bias.split(linear.outputs), strict=True):
            targets[f"{name}.bias"].copy_(part)
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [48, (32, 16, 16)])
def test_a_product_is_near_the_exact_one(outputs, bias):
    width = 48 if outputs == 48 else 64
    weight, offsets, x = random(width, 96, seed=1), random(width, seed=2) if bias else None, random(10, 96)
    exact = fill(Linear(96, outputs, bias), weight, offsets)(x)
    product = fill(Fp8Linear(96, outputs, bias, dtype=torch.float32), weight, offsets)(quantize_rows(x))
    assert (product - exact).norm() / exact.norm() < 0.05
    total = random(10, width, seed=3)
    expected = total + product
    assert fill(Fp8Linear(96, outputs, bias, dtype=torch.float32), weight, offsets)(quantize_rows(x), total) is total
    torch.testing.assert_close(total, expected)


def test_the_reference_agrees_with_the_product_that_torch_has():
    (x, x_scale), (weight, weight_scale) = quantize_rows(random(24, 64)), quantize_rows(random(48, 64, seed=1))
    theirs = torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    torch.testing.assert_close(scaled_product(x, x_scale, weight, weight_scale.t(), None, torch.bfloat16), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_model_is_near_the_exact_one(tied, dtype):
    config = small_config(tied_embeddings=tied, qkv_bias=True, qk_norm="per_head")
    tokens = torch.arange(40) * 7 % 320

    def logits(model: DecoderModel) -> torch.Tensor:
        _, step = one_sequence(config, 40, dtype)
        with torch.inference_mode():
            return model.logits(model(tokens, torch.arange(40), step))

    exact = logits(small_model(config, dtype))
    quantized = small_model(config, dtype, quantization="fp8")
    found = logits(quantized)
    assert 0 < (found - exact).norm() / exact.norm() < 0.15
    assert quantized.embedding.dtype == dtype
    matrices = [each for each in quantized.modules() if isinstance(each, Fp8Linear)]
    assert len(matrices) == 4 * len(config.layers) + 1
    assert all(each.weight.dtype == FP8 and each.scale.dtype == torch.float32 for each in matrices)


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_are_quantized_as_they_are_loaded(tied, checkpoint):
    directory = checkpoint("llama", tied=tied, attention_bias=True)
    config = read_model_config(read_json(directory / "config.json"))
    exact, quantized = (
        DecoderModel(config, torch.float32, CPU, TorchKernels(), linear) for linear in (Linear, Fp8Linear)
    )
    for model in (exact, quantized):
        weights.load(directory, model.targets(), config)
    assert torch.equal(exact.embedding, quantized.embedding)
    head = exact.embedding if tied else exact.head.weight.t()
    pairs = [(quantized.head, head)]
    for theirs, ours in zip(exact.layers, quantized.layers, strict=True):
        assert torch.equal(theirs.attention.qkv.bias, ours.attention.qkv.bias)
        pairs += [(ours.attention.qkv, theirs.attention.qkv.weight.t()), (ours.mlp.down, theirs.mlp.down.weight.t())]
    for linear, weight in pairs:
        rows, scale = quantize_rows(weight)
        assert torch.equal(linear.weight.float(), rows.float())
        assert torch.equal(linear.scale.t(), scale)


@pytest.mark.parametrize(
    "architecture", quick_if({"gpt_oss", "granite", "llama", "phi3", "qwen3_moe"}.__contains__, ARCHITECTURES)
)
def test_every_architecture_runs_with_quantized_weights(architecture, checkpoint, runner_for):
    """Logits of most prompts are near the exact ones. Of some, the router chooses other experts.

    Each size of the checkpoint is a multiple of 16.
    """
    directory, errors = checkpoint(architecture, vocab_size=416), []
    for seed in range(8):
        prompt = np.random.default_rng(seed).integers(2, 390, 10 + seed).tolist()
        exact, quantized = (
            step_logits(runner_for(directory, quantization=quantization), prompt) for quantization in ("none", "fp8")
        )
        errors.append(float((quantized - exact).norm() / exact.norm()))
    assert 0 < np.median(errors) < 0.2


def step_logits(driver: Driver, prompt: list[int]) -> torch.Tensor:
    """Return the logits after ``prompt``, ``[1, vocab_size]``."""
    plan = driver.plan(admissions=(admission(0, prompt, [0, 1]),), batch=batch([0], [len(prompt)]))
    [(_, logits)] = run_on(driver.runner, [plan])
    assert logits is not None
    return logits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 100}, "flag quantization=fp8: the model's intermediate_size is 100, .* multiple of 16"),
        ({"vocab_size": 321}, "vocab_size is 321"),
        ({"heads": 3, "kv_heads": 1, "head_dim": 24}, r"num_attention_heads \* head_dim is 72"),
    ],
)
def test_sizes_that_have_no_product_are_refused(changes, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        make_linear(small_config(**changes), torch.bfloat16, CPU, "fp8")
    assert refused.value.field == "quantization"


def test_float32_is_refused_on_cuda():
    with pytest.raises(InvalidRequest, match="dtype is float32; use dtype=bfloat16 or quantization=none"):
        refuse_unquantizable(small_config(), torch.float32, torch.device("cuda"))


def test_each_device_gets_its_layout():
    config, dtype = small_config(), torch.bfloat16
    assert make_linear(config, dtype, CPU, "none")(8, 4, False).weight.shape == (8, 4)
    assert make_linear(config, dtype, torch.device("cuda"), "none")(8, 4, False).weight.shape == (4, 8)
    assert isinstance(make_linear(config, dtype, CPU, "fp8")(16, 16, False), Fp8Linear)
