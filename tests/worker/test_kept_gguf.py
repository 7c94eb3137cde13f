"""Weights of GGUF files that stay quantized: on GPUs, computed by the reference forms on a CPU, and on CPUs."""

from functools import partial
from pathlib import Path

import gguf
import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.model.quantized.gguf import SCHEMES
from services.worker.described.forms import IN_DTYPE, MATRICES, WeightForm, kept_bits
from services.worker.described.memory import FLOAT32, weight_bytes
from services.worker.described.ranks import Ranks
from services.worker.layers.integers import IntegerLinear
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.quantized_weight import QuantizedWeight
from services.worker.models import staging, weights
from services.worker.models.decoder import DecoderModel
from services.worker.models.gguf_shard import open_shard
from tests.gguf_files import random_blocks, write_gguf
from tests.worker.parallel.test_loading import grid
from tests.worker.small_models import CPU
from tests.worker.test_choices import chosen_quantization, cpu, gpu
from tests.worker.test_kept_weights import (
    MOE,
    SIZES,
    config_of,
    forms_of,
    is_quantized,
    kept_forms,
    loaded,
    logits_of,
    made_for,
    values_of,
)

# Forms by types: ``A`` for all matrices, or ``A, B in TEXT``: B where the name in the file contains TEXT.
FORMS: dict[str, set[WeightForm]] = {
    "Q4_0": {WeightForm("grouped", 4, 32)},
    "Q4_1": {WeightForm("grouped", 4, 32, True)},
    "Q5_0": {WeightForm("grouped", 8, 32)},
    "Q5_1": {WeightForm("grouped", 8, 32, True)},
    "Q8_0": {WeightForm("grouped", 8, 32)},
    "Q4_K": {WeightForm("grouped", 4, 32, True)},
    "Q5_K": {WeightForm("grouped", 8, 32, True)},
    "Q4_0, Q8_0 in ffn_down": {WeightForm("grouped", 4, 32), WeightForm("grouped", 8, 32)},
    # Parts of a matrix have one form.
    "Q4_K, Q5_K in attn_v": {WeightForm("grouped", 4, 32, True), WeightForm("grouped", 8, 32, True)},
    "Q4_0, Q4_1 in attn_q": {WeightForm("grouped", 4, 32), WeightForm("grouped", 4, 32, True)},
    "Q4_0, Q8_0 in ffn_up": {WeightForm("grouped", 4, 32), WeightForm("grouped", 8, 32)},
}


@pytest.fixture(scope="session")
def files(checkpoint, tmp_path_factory):
    """Return a function that writes a GGUF file of random integers, with ``kinds`` as in ``FORMS``."""
    made: dict[tuple, Path] = {}

    def make(kinds: str, architecture: str = "llama", head: str = "Q8_0", **sizes) -> Path:
        key = kinds, architecture, head, tuple(sizes.items())
        if key in made:
            return made[key]
        kind, _, others = kinds.partition(", ")
        other, _, place = others.partition(" in ")

        def blocks(name, tensor):
            if "ffn_gate_inp" in name:
                chosen = "F32"
            elif name.startswith(("token_embd", "output")):
                chosen = head
            else:
                chosen = other if place and place in name else kind
            if chosen == "F32":
                return tensor, gguf.GGMLQuantizationType.F32
            return random_blocks(chosen, tensor.shape, seed=len(name)), gguf.GGMLQuantizationType[chosen]

        directory = checkpoint(architecture, **SIZES | sizes)
        made[key] = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", directory, blocks=blocks)
        return made[key]

    return make


@pytest.mark.parametrize("ranks", [*grid(2, 1), Ranks()], ids=str)
@pytest.mark.parametrize("kinds", FORMS)
def test_weights_keep_the_values_of_the_file(kinds, ranks, files):
    path = files(kinds)
    assert kept_forms(path, ranks) == FORMS[kinds]
    model = loaded(path, ranks)
    found, expected = values_of(model), values_of(loaded(path, ranks, kept=False))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
        assert is_quantized(model, name) == name.endswith("_proj.weight")


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [("llama", {}), ("qwen3", {}), ("qwen3_moe", MOE), ("mixtral", {"num_local_experts": 4})],
)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_logits_are_those_of_the_file(kind, architecture, sizes, files):
    path = files(kind, architecture, **sizes)
    assert kept_forms(path) == FORMS[kind]
    expected = logits_of(loaded(path, kept=False))
    torch.testing.assert_close(logits_of(loaded(path)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "converted", "reason"),
    [
        ("Q6_K", set(MATRICES), "there is no product for blocks of the type Q6_K"),
        ("Q4_K, Q6_K in ffn_down", {"down"}, "there is no product for blocks of the type Q6_K"),
        ("Q4_K, Q6_K in attn_v", {"qkv"}, "there is no product for blocks of the type Q6_K"),
        ("IQ4_NL", set(MATRICES), "there is no product for blocks of the type IQ4_NL"),
        ("Q4_0, F32 in attn_v", {"qkv"}, "not all parts of a matrix are quantized alike"),
        ("Q4_0, F32 in ffn_down", {"down"}, ""),
    ],
)
def test_matrices_of_other_types_are_converted_with_the_reason(kinds, converted, reason, files):
    path = files(kinds)
    [form] = set(forms_of(path))
    found = {name for name, each in zip(MATRICES, form.forms, strict=True) if each == IN_DTYPE}
    assert (found, form.reason) == (converted | {"experts"}, reason)
    assert kept_bits(config_of(path)) is None
    torch.testing.assert_close(logits_of(loaded(path)), logits_of(loaded(path, kept=False)), rtol=1e-4, atol=1e-4)


def test_a_file_of_floats_is_not_quantized(files):
    path = files("F32", head="F32")
    assert config_of(path).quantization is None


def test_a_sleep_that_reads_the_file_again_leaves_equal_weights(files):
    path = files("Q4_K")
    model, other = loaded(path), made_for(config_of(path), Ranks(), kept=True)
    staging.apply(staging.stage(path, other, other.config), other)
    expected = values_of(model)
    for name, tensor in values_of(other).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q5_0", 8), ("Q8_0", 8)])
def test_cpus_store_any_integers_of_a_file_unchanged(kind, bits, files):
    name = "model.layers.0.mlp.up_proj.weight"
    linear = IntegerLinear(SIZES["hidden_size"], SIZES["intermediate_size"], bits=bits)
    target = linear.targets(name.removesuffix(".weight"))[name]
    with open_shard(files(kind)) as shard:
        stored, expected = shard.get_slice(name), shard.get_tensor(name)
        assert target.keeps(stored.scheme)
        target.copy_quantized(stored.weight())
    assert torch.equal(linear.dequantized().t(), expected)


@pytest.mark.parametrize("head", ["Q8_0", "Q5_0"])
def test_a_head_that_is_tied_to_the_embedding_keeps_its_values(head, files):
    path = files("Q4_0", "qwen3", head, tie_word_embeddings=True)
    model = loaded_on_cpu(path, bits=4)
    assert model.config.tied_embeddings
    with open_shard(path) as shard:
        expected = shard.get_tensor("model.embed_tokens.weight")
    assert torch.equal(model.embedding, expected)
    assert torch.equal(model.head.dequantized().t(), expected)


@pytest.mark.parametrize("ranks", [*grid(2, 1), Ranks()], ids=str)
@pytest.mark.parametrize(("architecture", "sizes"), [("llama", {}), ("mixtral", {"num_local_experts": 4})])
def test_ranks_on_cpus_store_their_share_unchanged(architecture, sizes, ranks, files):
    path = files("Q4_0", architecture, **sizes)
    found, expected = values_of(loaded_on_cpu(path, ranks, bits=4)), values_of(loaded(path, ranks, kept=False))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def loaded_on_cpu(path: Path, ranks: Ranks | None = None, *, bits: int) -> DecoderModel:
    """Return a model whose weights are integers of ``bits``, as CPUs store them."""
    config, ranks = config_of(path), ranks or Ranks()
    linear = partial(IntegerLinear, bits=bits)
    model = DecoderModel(config, torch.float32, CPU, TorchKernels(), linear, ranks=ranks, layers=range(2))
    weights.load(path, model.targets(), model.config)
    return model


def test_scales_whose_offsets_exceed_float16_are_refused():
    linear = IntegerLinear(32, 1, bits=4)
    weight = QuantizedWeight(SCHEMES["Q4_0"], torch.ones(1, 32, dtype=torch.int8), torch.tensor([[9000.0]]), None)
    with pytest.raises(ValueError, match="it has scales above 8,188, whose offsets exceed float16"):
        linear.targets("m")["m.weight"].copy_quantized(weight)


@pytest.mark.parametrize(
    ("kinds", "head", "flags", "expected"),
    [
        ("Q4_1", "Q8_0", {}, ("int4", "weights stay Q4_1")),
        ("Q4_0, Q4_1 in ffn_down", "Q8_0", {}, ("int4", "weights stay Q4_0 and Q4_1")),
        ("Q8_0", "Q8_0", {"dtype": "float32"}, ("int8", "weights stay Q8_0")),
        ("Q8_0", "Q8_0", {"dtype": "bfloat16"}, ("none", "(Q8_0) are converted to dtype on CPUs")),
        ("Q4_0", "Q4_0", {}, ("none", "(Q4_0) are converted to dtype on CPUs")),
        ("Q5_1", "Q8_0", {}, ("none", "(Q5_1) are converted to dtype on CPUs")),
        ("Q4_0, Q8_0 in ffn_down", "Q8_0", {}, ("none", "are converted to dtype on CPUs")),
    ],
)
def test_cpus_keep_the_integers_that_their_products_take(kinds, head, flags, expected, files):
    value, reason = chosen_quantization(config_of(files(kinds, head=head)), cpu(20), **flags)
    assert value == expected[0]
    assert reason.endswith(expected[1])


def test_gpus_keep_all_integers(files):
    model = config_of(files("Q4_K, Q5_K in ffn_down"))
    assert chosen_quantization(model, gpu(139)) == ("checkpoint", "weights stay Q4_K and Q5_K")
    model = config_of(files("Q4_K, Q6_K in ffn_down"))
    assert (
        chosen_quantization(model, cpu(20))[1]
        == "the checkpoint's weights (Q4_K and Q6_K) are converted to dtype on CPUs"
    )
    reason = "weights stay Q4_K, except some in 2 of 2 layers: there is no product for blocks of the type Q6_K"
    assert chosen_quantization(model, gpu(139)) == ("checkpoint", reason)


@pytest.mark.parametrize("kinds", ["Q4_K", "Q4_K, Q6_K in ffn_down", "Q4_0, Q8_0 in ffn_down"])
def test_the_estimate_of_memory_is_that_of_the_stored_weights(kinds, files):
    path = files(kinds)
    estimate = weight_bytes(config_of(path), Ranks(), range(2), FLOAT32, "checkpoint")
    model = loaded(path)
    assert estimate == pytest.approx(sum(each.nbytes for each in (*model.parameters(), *model.buffers())), rel=0.01)


def test_checkpoint_is_refused_on_cpus_with_the_value_that_keeps_the_weights(files):
    with pytest.raises(
        InvalidRequest, match="CPUs keep these weights with quantization=int8; use quantization=auto, int8 or none"
    ):
        chosen_quantization(config_of(files("Q8_0")), cpu(20), quantization="checkpoint")
