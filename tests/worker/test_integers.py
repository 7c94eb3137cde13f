"""Weights of 8 and 4 bits on CPUs, against the same weights in float32."""

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.model.json_object import read_json
from services.worker.boot.common import boot
from services.worker.described.refusals import refuse_integer_weights
from services.worker.described.registry import read_model_config
from services.worker.layers.factory import make_linear
from services.worker.layers.integers import IntegerLinear, dequantized, to_integers
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.linear import Linear
from services.worker.layers.vectors_cpu import most_rows
from services.worker.models import fused_cpu, weights
from services.worker.models.decoder import DecoderModel
from services.worker.models.experts import Experts
from services.worker.runner.runner import StepRunner
from tests import real_model
from tests.gguf_files import write_gguf
from tests.real_model import needs_real_model
from tests.worker.driver import Driver
from tests.worker.other_processors import compiled_for
from tests.worker.small_models import CPU, one_sequence, small_config, small_model
from tests.worker.test_quantization import fill

BITS, QUANTIZATIONS = (8, 4), ("int8", "int4")
# Mixtures of experts, with arguments of their checkpoints for whole groups, also on each of two ranks.
MIXTURES = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "glm4_moe": {"moe_intermediate_size": 64, "intermediate_size": 192},
    "mixtral": {"intermediate_size": 128},
}
PROMPTS = ([3 + index * 7 % 300 for index in range(40)], [5, 6], list(range(20, 90)))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(
    weight: torch.Tensor, outputs: int | list[int], bits: int, bias: torch.Tensor | None = None
) -> IntegerLinear:
    """Return a layer with the parts of a checkpoint copied into it."""
    linear = IntegerLinear(weight.shape[1], outputs, bias is not None, bits=bits)
    return fill(linear, weight, bias)


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    groups=st.integers(1, 4),
    outputs=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 1000),
)
def test_packed_weights_are_the_quantized_ones(bits, groups, outputs, size, seed):
    weight = random(sum(outputs), 32 * groups, seed=seed) * size
    values, scales = to_integers(weight, bits)
    assert values.min() >= (-127 if bits == 8 else 0)
    assert values.max() <= (127 if bits == 8 else 15)
    expected = values.unflatten(1, (groups, 32)) * scales[..., :1].float()
    if bits == 4:
        expected = expected + scales[..., 1:].float()
    found = filled(weight, outputs, bits).dequantized().t()
    assert torch.equal(found, expected.flatten(1))
    # Half a step, and the rounding of the scale to float16. The search for scales may exceed it for single values.
    parts = weight.unflatten(1, (groups, 32))
    step = parts.abs().amax(2, keepdim=True) / 127 if bits == 8 else (parts.amax(2) - parts.amin(2)).unsqueeze(2) / 15
    error = (found - weight).unflatten(1, (groups, 32)).square().mean(2, keepdim=True).sqrt()
    assert (error <= step * (0.5 + 128 * 2**-11) + size * 2**-10).all()
    if bits == 8:
        assert torch.equal(filled(found, outputs, bits).dequantized().t(), found)  # quantizing again changes nothing


def test_the_search_for_scales_of_4_bits_lowers_the_error_of_the_least_and_largest_value():
    weight = random(64, 320)
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    between = torch.from_numpy(gguf.quants.dequantize(expected, gguf.GGMLQuantizationType.Q4_1))
    errors = [
        (each - weight).unflatten(1, (-1, 32)).square().sum(2)
        for each in (filled(weight, 64, 4).dequantized().t(), between)
    ]
    assert (errors[0] <= errors[1] * 1.01).all()
    assert errors[0].sum() < 0.9 * errors[1].sum()
    assert torch.equal(filled(between, 64, 4).dequantized().t(), between)  # values of Q4_1 do not change


@pytest.mark.parametrize("bits", BITS)
def test_groups_of_one_value_are_exact_up_to_float16(bits):
    weight = torch.zeros(70, 64)
    weight[1], weight[2] = 0.5, -0.25
    torch.testing.assert_close(filled(weight, 70, bits).dequantized().t(), weight, atol=0, rtol=2**-11)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_changes_only_its_output(bad, bits):
    weight = random(10, 64)
    weight[3, 40] = bad
    linear = filled(weight, 10, bits)
    for rows in (2, 20):
        assert linear(random(rows, 64)).isfinite().all(dim=0).tolist() == [index != 3 for index in range(10)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("outputs", [64, [40, 30], [128, 64, 64], 1, [1024, 70]])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 33, 70])
def test_a_product_is_that_with_the_dequantized_weight(rows, outputs, bits):
    width = outputs if isinstance(outputs, int) else sum(outputs)
    x, bias = random(rows, 224, seed=1), random(width, seed=2)
    linear = filled(random(width, 224), outputs, bits, bias)
    expected = x @ linear.dequantized() + bias
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=0)
    total = random(rows, width, seed=3)
    assert linear(x, total) is total
    torch.testing.assert_close(total, random(rows, width, seed=3) + expected, atol=1e-4, rtol=0)
    rounded = linear(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, atol=0.05 * width**0.5, rtol=0.05)


@pytest.fixture
def few_registers():
    """Compile products for processors whose registers hold the sums of one row."""
    with compiled_for(rows=1):
        yield


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.usefixtures("few_registers")
def test_products_are_the_same_on_processors_with_few_registers(bits):
    linear = filled(random(100, 224), 100, bits)
    for rows in (1, 3, 16, 40):
        x = random(rows, 224, seed=rows)
        torch.testing.assert_close(linear(x), x @ linear.dequantized(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sizes", [range(1, 1 + 2 * most_rows()), range(1 + 2 * most_rows(), 24)], ids=["few", "many"])
def test_a_row_has_the_same_result_among_any_few_or_many_rows(sizes, bits):
    linear, x = filled(random(100, 1056), 100, bits), random(sizes[-1], 1056, seed=1)
    expected = linear(x)
    assert all(torch.equal(linear(x[-rows:]), expected[-rows:]) for rows in sizes)


def as_floats(model: DecoderModel) -> DecoderModel:
    """Replace the integer layers and experts of ``model`` by plain ones with the same weights in float32. Return it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, IntegerLinear):
                plain = Linear(child.inputs, child.outputs)
                with torch.no_grad():
                    plain.weight.copy_(child.dequantized())
                plain.bias = child.bias
                setattr(parent, name, plain)
        if isinstance(parent, Experts) and parent.gate_up_scale is not None:
            for name, values in as_float_experts(parent).items():
                setattr(parent, name, values)
    return model


def as_float_experts(experts: Experts) -> dict[str, torch.Tensor | None]:
    """Return the matrices of integer experts in float32, and no scales, by the names of ``Experts``."""
    width, hidden = experts.features.width, experts.router.shape[1]
    found: dict[str, torch.Tensor | None] = {"gate_up_scale": None, "down_matrix_scale": None}
    for name, outputs in (("gate_up", 2 * width), ("down_matrix", hidden)):
        pairs = zip(getattr(experts, name), getattr(experts, f"{name}_scale"), strict=True)
        found[name] = torch.stack([dequantized(weight, scale, outputs).t() for weight, scale in pairs])
    return found


def plain_logits(model: DecoderModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits after each of ``tokens``, by plain attention."""
    _, step = one_sequence(model.config, len(tokens))
    with torch.inference_mode():
        return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), step))


def check_against_floats(runner: StepRunner, model: DecoderModel, prompts, count: int) -> None:
    """Generate with ``runner``, and compare tokens and log-probabilities with ``model``, whose layers are replaced."""
    driver = Driver(runner)
    answers = driver.generate(list(prompts), count, logprobs=True)
    as_floats(model)
    for slot, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        expected = plain_logits(model, list(prompt) + tokens)[len(prompt) - 1 : -1].log_softmax(-1).max(-1)
        assert tokens == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(driver.logprobs[slot]), expected.values, rtol=0, atol=1e-3)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("arguments", [{"tied": True}, {"tied": False, "attention_bias": True}], ids=["tied", "biases"])
def test_decoding_gives_the_tokens_of_the_dequantized_weights(arguments, quantization, checkpoint, monkeypatch):
    calls, call = [], fused_cpu.FusedDecoder.__call__
    monkeypatch.setattr(
        fused_cpu.FusedDecoder, "__call__", lambda *arguments: calls.append(arguments) or call(*arguments)
    )
    flags = {"device": "cpu", "kv_cache_num_tokens": 4096, "torch_num_threads": 2, "quantization": quantization}
    booted = boot(WorkerConfig(model=str(checkpoint("llama", **arguments)), **flags))
    check_against_floats(booted.runner, booted.loaded.model, PROMPTS, 12)
    assert calls
    booted.runner.close()


@needs_real_model
@pytest.mark.slow
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_decoding_a_real_model_gives_the_tokens_of_the_dequantized_weights(quantization):
    flags = {"device": "cpu", "kv_cache_num_tokens": 4096, "torch_num_threads": 2, "quantization": quantization}
    booted = boot(WorkerConfig(model=str(real_model.PATH), **flags))
    check_against_floats(booted.runner, booted.loaded.model, PROMPTS, 12)
    booted.runner.close()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("changes", [{}, {"kind": "plain"}, {"norm_placement": "both"}, {"qk_norm": "whole"}])
def test_the_plain_layer_takes_integers_too(changes, quantization):
    model = small_model(small_config(**changes), quantization=quantization)
    tokens = [int(token) for token in torch.arange(40) * 7 % 320]
    found = plain_logits(model, tokens)
    torch.testing.assert_close(found, plain_logits(as_floats(model), tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("kind", "quantization"), [("Q8_0", "int8"), ("Q4_1", "int4")])
def test_weights_of_a_gguf_file_do_not_change(kind, quantization, checkpoint, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama"), kind=gguf.GGMLQuantizationType[kind])
    flags = {"device": "cpu", "kv_cache_num_tokens": 4096, "torch_num_threads": 1}
    exact, narrow = (boot(WorkerConfig(model=str(path), quantization=each, **flags)) for each in ("none", quantization))
    pairs = zip(exact.loaded.model.layers, narrow.loaded.model.layers, strict=True)
    for layer, other in pairs:
        for ours, theirs in ((other.attention.qkv, layer.attention.qkv), (other.mlp.down, layer.mlp.down)):
            expected = theirs.columns(torch.arange(theirs.width)).t()
            torch.testing.assert_close(ours.dequantized(), expected, atol=1e-6, rtol=1e-3)
    for each in (exact, narrow):
        each.runner.close()


@pytest.mark.parametrize(
    ("changes", "device", "tp_size", "message"),
    [
        ({}, "cuda", 1, "quantization=int8: on cuda, products of integer weights take inputs of 16 bits, but dtype is"),
        ({"intermediate_size": 100}, "cpu", 1, "intermediate_size is 100, which is not a multiple of 32; use"),
        ({"hidden_size": 72}, "cpu", 1, "hidden_size is 72"),
        ({"heads": 3, "kv_heads": 1}, "cpu", 2, r"head_dim is 48 on each of tp_size=2 ranks, .* or a lower tp_size"),
    ],
)
def test_unsupported_sizes_and_devices_are_refused(changes, device, tp_size, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        make_linear(small_config(**changes), torch.float32, torch.device(device), "int8", tp_size)
    assert refused.value.field == "quantization"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_gives_the_tokens_of_the_dequantized_weights(architecture, quantization, checkpoint):
    """GLM has dense layers and shared experts too."""
    flags = {"device": "cpu", "kv_cache_num_tokens": 4096, "torch_num_threads": 2, "quantization": quantization}
    booted = boot(WorkerConfig(model=str(checkpoint(architecture, **MIXTURES[architecture])), **flags))
    model = booted.loaded.model
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    assert {each.gate_up.dtype for each in mixtures} == {torch.int8 if quantization == "int8" else torch.uint8}
    assert all(each.shared is None or isinstance(each.shared.inner, IntegerLinear) for each in mixtures)
    assert {each.router.dtype for each in mixtures} == {torch.float32}
    check_against_floats(booted.runner, model, PROMPTS, 12)
    booted.runner.close()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_experts_have_the_integers_of_their_checkpoint(quantization, checkpoint):
    """gpt-oss has biases, and one tensor for the gates and ups of all experts."""
    directory = checkpoint("gpt_oss", intermediate_size=96)
    described = read_model_config(read_json(directory / "config.json"))
    exact, narrow = (DecoderModel(described, torch.float32, CPU, TorchKernels(), each) for each in (
        Linear, make_linear(described, torch.float32, CPU, quantization)
    ))  # fmt: skip
    for model in (exact, narrow):
        weights.load(directory, model.targets(), described)
    x = random(5, described.hidden_size)
    for layer, other in zip(exact.layers, narrow.layers, strict=True):
        found = as_float_experts(other.mlp)
        for name, matrix in (("gate_up", layer.mlp.gate_up), ("down_matrix", layer.mlp.down_matrix)):
            values, scales = to_integers(matrix.flatten(0, 1), int(quantization.removeprefix("int")))
            expected = values.unflatten(1, (-1, 32)) * scales[..., :1].float()
            expected = expected + scales[..., 1:].float() if quantization == "int4" else expected
            # Sums of the search for scales are rounded otherwise for values in another order.
            assert (found[name].flatten(0, 1) != expected.flatten(1)).float().mean() <= (quantization == "int4") / 100
        mixed = other.mlp.down(x)
        for name, values in found.items():
            setattr(layer.mlp, name, values)
        torch.testing.assert_close(mixed, layer.mlp.down(x), atol=1e-4, rtol=0)


def test_the_width_of_experts_matters(checkpoint):
    config = read_model_config(read_json(checkpoint("qwen3_moe") / "config.json"))
    with pytest.raises(InvalidRequest, match="width of an expert is 48, which is not a multiple of 32; use quant"):
        refuse_integer_weights(config, "int8", 1)


def test_the_embedding_keeps_its_dtype_and_the_head_has_8_bits():
    model = small_model(small_config(), torch.bfloat16, quantization="int4")
    assert model.embedding.dtype == torch.bfloat16
    assert model.layers[0].mlp.down.weight.dtype == torch.uint8
    assert isinstance(model.head, IntegerLinear)
    assert model.head.weight.dtype == torch.int8
    assert model.head.weight.device == CPU
