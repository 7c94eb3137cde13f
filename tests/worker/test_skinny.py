"""Products of few rows, and the decoder made of them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from services.worker.described.ranks import Ranks
from services.worker.layers.cuda_devices import even_stages, fitting_stages
from services.worker.layers.fp8 import quantize_rows
from services.worker.layers.grouped import GroupedLinear, GroupedWeights
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.linear import Linear
from services.worker.models.decoder import DecoderModel
from tests.quick import quick_if
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.small_models import PlainRotatingStep, one_sequence, small_config, small_model

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

# The interpreter multiplies no bfloat16.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
EPS = 1e-5
INPUTS, OUTPUTS = 160, 72


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def product(x, weight, bias=None, scale=None, **how):
    from services.worker.layers.triton_skinny import LinearWeights, skinny_product

    return skinny_product(x, LinearWeights(weight, bias, scale), **how)


def product_sum(x, weight, bias, onto, next_norm, scale=None):
    from services.worker.layers.triton_skinny import LinearWeights, skinny_sum

    return skinny_sum(x, LinearWeights(weight, bias, scale), onto, next_norm)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2**-9 if torch.float16 == DTYPE else 2**-6
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("inputs", [INPUTS, 700, 1024])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13])
def test_products_of_any_size(rows, inputs):
    x, weight = random(rows, inputs), random(OUTPUTS, inputs, seed=1)
    check(product(x, weight), x.float() @ weight.float().t())


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_norm_bias_and_sum_are_part_of_the_product(rows):
    x, weight, bias = random(rows, INPUTS), random(OUTPUTS, INPUTS, seed=1), random(OUTPUTS)
    total = random(rows, OUTPUTS)
    norm = 1 + random(INPUTS, seed=2) / 4
    before = total.float()
    found = product(3 * x, weight, bias, norm=(norm, EPS), onto=total)
    normed = F.rms_norm(3 * x.float(), (INPUTS,), norm.float(), EPS)
    assert found is total
    check(found, normed @ weight.float().t() + bias.float() + before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_gates_are_those_of_two_products(rows, bias):
    x, weight = random(rows, INPUTS), random(2 * OUTPUTS, INPUTS, seed=1) / 4
    bias = random(2 * OUTPUTS, seed=2) if bias else None
    gate, up = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=1)
    check(product(x, weight, bias, gated=True), F.silu(gate) * up)


@pytest.mark.parametrize("rows", [2, 3, 5, 16])
def test_a_sum_is_prepared_for_the_next_norm(rows):
    x, weight, bias, total = (
        random(rows, INPUTS),
        random(OUTPUTS, INPUTS, seed=1),
        random(OUTPUTS),
        random(rows, OUTPUTS),
    )
    norm, following = 1 + random(OUTPUTS, seed=2) / 4, random(48, OUTPUTS, seed=3)
    stream = total.float() + x.float() @ weight.float().t() + bias.float()
    norm_input = product_sum(x, weight, bias, total, norm)
    check(total, stream)
    check(norm_input.squares.sum(0), stream.square().sum(1))
    expected = F.rms_norm(stream, (OUTPUTS,), norm.float(), EPS) @ following.float().t()
    check(product(norm_input, following, norm=(norm, EPS)), expected)


def test_one_row_is_summed_as_it_is():
    x, weight, bias, total = random(1, INPUTS), random(OUTPUTS, INPUTS, seed=1), random(OUTPUTS), random(1, OUTPUTS)
    stream = total.float() + x.float() @ weight.float().t() + bias.float()
    assert product_sum(x, weight, bias, total, random(OUTPUTS)) is total
    check(total, stream)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_weights_in_fp8_are_scaled_by_row(rows, gated):
    x, norm = random(rows, INPUTS), 1 + random(INPUTS, seed=2) / 4
    weight, scale = quantize_rows(random(2 * OUTPUTS, INPUTS, seed=1) / 4)
    bias, total = random(2 * OUTPUTS, seed=3), random(rows, OUTPUTS if gated else 2 * OUTPUTS, seed=4)
    normed = F.rms_norm(x.float(), (INPUTS,), norm.float(), EPS)
    expected = F.linear(normed, weight.float() * scale, bias.float())
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    expected = expected + total.float()
    check(product(x, weight, bias, scale[:, 0], norm=(norm, EPS), gated=gated, onto=total), expected)


@pytest.mark.parametrize("dtype", [DTYPE, torch.float16])
def test_each_value_of_fp8_is_converted_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    values = codes.where(codes & 127 != 127, 0).view(torch.float8_e4m3fn)  # without NaN
    weight, scale, picks = values.expand(16, 256).contiguous(), torch.ones(16, device=DEVICE), torch.eye(256)
    found = [product(x.contiguous(), weight, None, scale) for x in picks.to(DEVICE, dtype).split(16)]
    assert torch.equal(torch.cat(found).float(), values.float()[:, None].expand(256, 16))


def test_inputs_that_no_program_holds_at_once_go_through_tiles():
    x, weight = random(1, 40_000), random(16, 40_000, seed=1)
    check(product(x, weight), x.float() @ weight.float().t())


def test_rows_are_normed():
    from services.worker.layers.triton_skinny import skinny_norm

    x, weight = 3 * random(5, INPUTS), 1 + random(INPUTS, seed=1) / 4
    check(skinny_norm(x, weight, EPS), F.rms_norm(x.float(), (INPUTS,), weight.float(), EPS))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU may do so")
def test_the_interpreter_overlaps_nothing():
    from services.worker.layers.triton_overlap import overlapping, overlaps

    assert not overlaps(DEVICE)
    assert overlapping(False) == {}


@pytest.mark.skipif(INTERPRETED, reason="kernels overlap on a GPU")
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_kernels_that_overlap_give_what_others_give(monkeypatch, rows):
    from services.worker.layers import triton_skinny

    size, wide, eps = 1024, 4096, EPS
    up, down = random(2 * wide, size) / 32, random(size, wide, seed=1) / 64
    norm, x = 1 + random(size, seed=2) / 4, random(rows, size, seed=3)

    def stream() -> torch.Tensor:
        total = x.clone()
        norm_input = total
        for _ in range(20):
            gated = product(norm_input, up, norm=(norm, eps), gated=True)
            norm_input = product_sum(gated, down, None, total, norm)
        return total

    found = [stream() for _ in range(5)]
    monkeypatch.setattr(triton_skinny, "overlaps", lambda device: False)
    expected = stream()
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0.02, atol=0.02)
        assert torch.equal(each, found[0])


def test_rows_of_padding_do_not_change_the_others():
    x, weight = random(8, INPUTS), random(OUTPUTS, INPUTS, seed=1)
    alone = product(x[:3], weight)
    assert torch.equal(product(x, weight)[:3], alone)


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="17 rows: expected 1 to 16"):
        product(random(17, INPUTS), random(OUTPUTS, INPUTS))


@pytest.mark.parametrize("stage", [16384, 24576, 25088, 26624, 28672, 32768, 33280, 34816, 36864])
def test_programs_fill_the_shared_memory_of_a_multiprocessor_and_one_program_half_of_it(stage):
    cpu = torch.device("cpu")  # the kernels' options there are those of an H200
    shared, own = 228 << 10, 1 << 10
    for programs in range(1, 3 * 132 + 1):
        average, stages = -(-programs // 132), even_stages(cpu, programs, stage)
        assert average * (stage * (stages - 1) + own) <= shared
        if average == 1:  # and then no more stages than that needs
            assert 2 * (stage * (stages - 1) + own) > shared >= 2 * (stage * (stages - 2) + own)
        else:
            assert average * (stage * stages + own) > shared
        assert fitting_stages(cpu, stage, stages) == stages
    assert even_stages(cpu, 3 * 132 + 1, stage) is None


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_shapes_that_were_measured_have_the_stages_that_were_measured(rows):
    from services.worker.layers.triton_grouped import choose_rows
    from services.worker.layers.triton_skinny import LinearWeights, choose_product

    stages = {}
    for outputs in (2048, 4096, 6144):
        with torch.device("meta"):
            plain = LinearWeights(torch.empty(outputs, 4096, dtype=torch.bfloat16))
            fp8 = LinearWeights(torch.empty(outputs, 4096, dtype=torch.float8_e4m3fn), None, torch.empty(outputs))
            integers = GroupedWeights.of(GroupedLinear(4096, outputs, bits=4))
        stages[outputs] = [choose_product(rows, each).stages for each in (plain, fp8)] + [
            choose_rows(rows, integers).stages
        ]
    few = {2048: [6, 9, 6], 4096: [5, 8, 5], 6144: [4, 5, 4]}
    assert stages == (few if rows <= 8 else {2048: [5, 6, 6], 4096: [4, 5, 6], 6144: [3, 4, 5]})


CONFIGS = {
    "llama": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen2": {"qkv_bias": True, "tied_embeddings": False},
    "qwen3": {"qk_norm": "per_head"},
    "odd sizes": {"hidden_size": 72, "intermediate_size": 88},
}


@pytest.mark.skipif(not INTERPRETED, reason="attention here is the reference, on the CPU")
@pytest.mark.parametrize(
    ("tokens", "keep"),
    quick_if(lambda tokens, keep: (keep is None) == (tokens == 2), [(7, None), (7, [6, 2]), (2, None), (12, [3])]),
)
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_the_decoder_gives_what_the_model_gives(changes, tokens, keep):
    from services.worker.models.skinny_cuda import SkinnyDecoder

    config = small_config(**changes)
    model = small_model(config, DTYPE, linear=partial(Linear, transposed=True))
    token_ids, positions = torch.arange(tokens) * 7 % config.vocab_size, torch.arange(tokens)
    keep = keep if keep is None else torch.tensor(keep)
    (plain_cache, plain), (cache, inner) = one_sequence(config, tokens, DTYPE), one_sequence(config, tokens, DTYPE)
    with torch.inference_mode():
        steps = [PlainRotatingStep(config, model.rotaries[0], positions, each) for each in (plain, inner)]
        expected = model(token_ids, positions, steps[0], keep)
        found = SkinnyDecoder(model)(token_ids, positions, steps[1], keep)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(cache.all_keys, plain_cache.all_keys, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not INTERPRETED, reason="attention here is the reference, on the CPU")
@pytest.mark.parametrize("tokens", [2, 7])
def test_a_decoder_in_fp8_gives_what_a_model_of_the_same_weights_gives(tokens):
    """The other model has the dequantised weights. Rows are not quantised."""
    from services.worker.models.skinny_cuda import SkinnyDecoder

    config = small_config(qkv_bias=True)
    model = small_model(config, DTYPE, quantization="fp8")
    same = small_model(config, DTYPE, linear=partial(Linear, transposed=True))
    with torch.inference_mode():
        for name, linear in same.named_modules():
            if isinstance(linear, Linear):
                quantized = model.get_submodule(name)
                linear.weight.copy_(quantized.weight.float() * quantized.scale.t())
        token_ids, positions = torch.arange(tokens) * 7 % config.vocab_size, torch.arange(tokens)
        found, expected = (
            SkinnyDecoder(each)(
                token_ids,
                positions,
                PlainRotatingStep(config, each.rotaries[0], positions, one_sequence(config, tokens, DTYPE)[1]),
            )
            for each in (model, same)
        )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not INTERPRETED, reason="attention here is the reference, on the CPU")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [2, 7])
def test_a_decoder_with_integer_weights_gives_what_a_model_of_the_same_weights_gives(tokens, bits):
    from services.worker.models.skinny_cuda import SkinnyDecoder

    config = small_config(qkv_bias=True, output_bias=True)
    model = small_model(config, DTYPE, linear=partial(GroupedLinear, bits=bits, group=32))
    token_ids, positions = torch.arange(tokens) * 7 % config.vocab_size, torch.arange(tokens)
    (_, plain), (_, inner) = one_sequence(config, tokens, DTYPE), one_sequence(config, tokens, DTYPE)
    with torch.inference_mode():
        steps = [PlainRotatingStep(config, model.rotaries[0], positions, each) for each in (plain, inner)]
        expected = model(token_ids, positions, steps[0])
        found = SkinnyDecoder(model)(token_ids, positions, steps[1])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("tp_size", "most"), [(1, 16), (2, 8)])
def test_several_ranks_take_the_kernels_for_fewer_rows(tp_size, most):
    from services.worker.models.skinny_cuda import SkinnyDecoder

    with torch.device("meta"):
        linear, ranks = partial(Linear, transposed=True), Ranks(0, tp_size, 0, 1)
        model = DecoderModel(small_config(), torch.bfloat16, torch.device("meta"), TorchKernels(), linear, ranks=ranks)
    assert SkinnyDecoder(model).most_rows == most


@pytest.mark.parametrize("linear", [Linear, partial(GroupedLinear, bits=4, ordered=True)])
def test_a_model_with_other_products_is_refused(linear):
    from services.worker.models.skinny_cuda import SkinnyDecoder

    with pytest.raises(ValueError, match="must be of Fp8Linear, BlockFp8Linear, GroupedLinear or transposed Linear"):
        SkinnyDecoder(small_model(small_config(), DTYPE, linear=linear))
